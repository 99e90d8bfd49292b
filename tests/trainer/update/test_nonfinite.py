"""A non-finite update changes nothing; the device's guard ends with the state of the host's."""

import copy
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import toys
from accelerator import CPU, DEVICE, needs_simulation
from regimen.callbacks.checkpoint import Checkpoint
from regimen.callbacks.ema import EMA
from regimen.callbacks.swa import SWA
from regimen.trainer import distributed
from regimen.trainer.callback import Callback
from regimen.trainer.checkpoints.reader import read_checkpoint
from regimen.trainer.checkpoints.store import CheckpointStore
from regimen.trainer.errors import DivergedError
from regimen.trainer.optimizers.optimizers import build_optimizers
from regimen.trainer.options import GradientNoise, TrainerOptions
from regimen.trainer.strategies.ddp import DDP
from regimen.trainer.strategies.fsdp import FSDP
from regimen.trainer.strategies.multi_process import MultiProcess
from regimen.trainer.strategies.strategy import Strategy
from regimen.trainer.tasks.classification import Classification
from regimen.trainer.trainer import Trainer
from toys import ON_DEVICE, Log, batches, differences, in_group, loader, normed, points

NODES = toys.optimizer_nodes() | {
    "rprop": {"_target_": "torch.optim.Rprop"},
    "asgd": {"_target_": "torch.optim.ASGD", "t0": 1},
    "adadelta": {"_target_": "torch.optim.Adadelta"},
    "adamax": {"_target_": "torch.optim.Adamax"},
}
EACH = pytest.mark.parametrize("name", list(NODES))


DECIDED = pytest.mark.parametrize("name", [pytest.param(n, id=n) for n in sorted(ON_DEVICE)])


UPDATES = 6  # of an epoch


def trainer_of(
    name: str,
    folder: Path,
    data: list[Any] | None = None,
    more: Any = None,
    device: torch.device = DEVICE,
    **options: Any,
) -> Trainer:
    """Build a trainer with whatever has a state around the optimizer, as for a GPU."""
    strategy = Strategy(device)
    model = strategy.prepare(normed())
    node = copy.deepcopy(NODES[name])
    optimizers = build_optimizers(model, node, prefer_fused=True, batch_size=8)
    first = next(iter(optimizers.optimizers.values()))
    for group in (g for o in optimizers.optimizers.values() for g in o.param_groups):
        if group.get("foreach", 0) is None and not group.get("fused"):
            group["foreach"] = True  # as torch chooses on a device: other roundings
    free = {"clip_grad_norm": 0.5, "gradient_noise": GradientNoise(eta=0.01, gamma=0.5)}
    callbacks = {
        "log": Log(),
        "ema": EMA(0.9),
        "swa": SWA(1, use_for_evaluation=False),
        "checkpoint": Checkpoint(every_n_steps=4, save_top_k=-1),
    }
    options = {"max_epochs": 2, "log_every_n_steps": 3, **options}
    return Trainer(
        model,
        Classification(3),
        optimizers,
        batches(UPDATES) if data is None else data,
        batches(UPDATES),
        torch.optim.lr_scheduler.CosineAnnealingLR(first, 2 * UPDATES),
        strategy,
        callbacks={**callbacks, **(more or {})},
        options=TrainerOptions(**({} if name == "lbfgs" else free) | options),  # type: ignore[arg-type]
        run_dir=folder,
    )


def changed_by_updates(trainer: Trainer) -> dict[str, Any]:
    """Return what an update that is left out must not change."""
    state = trainer.state_dict()
    return {"model": state["model"], "optimizer": state["optimizer"]}


def saved(folder: Path) -> dict[str, Any]:
    store = CheckpointStore(folder / "checkpoints")
    paths = sorted(store.folder.glob("step-*.pt"))
    parts = ("model", "optimizer", "lr_scheduler", "ema", "callbacks")
    return {p.name: {part: read_checkpoint(p)[part] for part in parts} for p in paths}


@needs_simulation
@EACH
def test_a_whole_run_is_the_same(name: str, tmp_path: Path) -> None:
    runs = {}
    for device in (CPU, DEVICE):
        trainer = trainer_of(name, tmp_path / str(device), device=device)
        begun = changed_by_updates(trainer)
        trainer.fit()
        assert differences(begun, changed_by_updates(trainer))  # LBFGS once did nothing at all
        log = trainer.callbacks["log"].lines  # type: ignore[attr-defined]
        runs[device] = {"log": log, "saved": saved(tmp_path / str(device))}
        assert set(runs[device]["saved"]) >= {"step-00000004.pt", "step-00000012.pt"}
    assert differences(runs[CPU], runs[DEVICE]) == []


@needs_simulation
@DECIDED
@pytest.mark.parametrize("bad", [0, 4])
def test_a_bad_update_ends_both_in_the_same_place(name: str, bad: int, tmp_path: Path) -> None:
    runs = {}
    for device in (CPU, DEVICE):
        folder = tmp_path / str(device)
        data = batches(UPDATES, bad)
        trainer = trainer_of(name, folder, data, device=device, log_every_n_steps=6)
        with pytest.raises(DivergedError, match=rf"update {bad + 1} \(step {bad + 1}, epoch 0\)"):
            trainer.fit()
        assert trainer.state.global_step == bad
        assert trainer.updater.guard.is_deferred == (device != CPU)
        log = trainer.callbacks["log"].lines  # type: ignore[attr-defined]
        runs[device] = {
            **changed_by_updates(trainer),
            "log": log,
            "saved": saved(folder),
        }
    # The host had let the schedule go on: the only thing that is not undone.
    found = differences(runs[CPU], runs[DEVICE])
    assert found == [path for path in found if path.endswith("/lr")]


@EACH
def test_after_a_first_update_left_out_the_rest_is_undisturbed(name: str, tmp_path: Path) -> None:
    good = batches(UPDATES)
    options = {"on_nonfinite": "skip", "max_epochs": 1, "gradient_noise": None}
    options |= {"gradient_accumulation_steps": 2}
    whole = trainer_of(name, tmp_path / "whole", good, **options)
    whole.fit()
    bad = (torch.full_like(good[0][0], float("nan")), good[0][1])
    disturbed = trainer_of(name, tmp_path / "disturbed", [bad, *good], **options)
    disturbed.fit()
    state = disturbed.state

    assert state.global_step == UPDATES
    assert state.skipped_updates == 1
    assert disturbed.metrics["train/skipped_updates"] == 1

    before = whole.state_dict()
    after = disturbed.state_dict()
    for key in ("model", "optimizer", "ema", "lr_scheduler"):
        assert differences(before[key], after[key]) == []


def test_weights_that_are_lost_end_a_run_that_skips() -> None:
    model = normed()
    with torch.no_grad():
        model[0].weight[0, 0] = float("nan")
    make = partial(torch.optim.AdamW, fused=True)
    options = {
        "max_epochs": 9,
        "on_nonfinite": "skip",
        "max_skipped_in_a_row": 7,
        "make": make,
    }
    trainer = toys.trainer_of(Classification(3), batches(UPDATES), model=model.double(), **options)

    with pytest.raises(DivergedError, match="last 7 updates"):
        trainer.fit()


class Observer(Callback):
    """Note the steps at which something looks at the model."""

    def __init__(self) -> None:
        self.at: list[int] = []

    def on_fit_end(self, trainer: Trainer) -> None:
        self.at.append(trainer.state.global_step)

    on_validation_start = on_epoch_end = on_fit_end


@pytest.mark.quick
@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"validate_every_n_steps": 4}, id="validation"),
        pytest.param({}, id="epoch"),
        pytest.param({"max_steps": 4}, id="end"),
    ],
)
def test_nothing_looks_at_a_run_whose_device_left_an_update_out(
    options: dict[str, Any], tmp_path: Path
) -> None:
    callback = Observer()
    trainer = trainer_of(
        "adamw",
        tmp_path / "run",
        batches(UPDATES, bad=2),
        {"callback": callback},
        log_every_n_steps=99,
        **options,
    )
    with pytest.raises(DivergedError, match="update 3"):
        trainer.fit()
    assert callback.at == []


def test_stopping_names_the_sample_and_keeps_finite_weights() -> None:
    model = normed()
    data = batches(5, bad=2)
    task = Classification(3)
    trainer = toys.trainer_of(task, data, model=model, precision="fp32")

    with pytest.raises(DivergedError, match=r"row 3 of the batch holds NaN.*update 3") as error:
        trainer.fit()
    assert error.value.exit_code == 5
    for t in model.state_dict().values():
        assert torch.isfinite(t).all()
    assert trainer.state.global_step == 2


class Alone(MultiProcess):
    """Each process trains its own weights; nobody exchanges gradients."""


@pytest.mark.parametrize("bad_ranks", [[1], [0, 1]], ids=["one", "all"])
def test_processes_that_decide_alone_wait_for_no_collective(
    ranks: Any, monkeypatch: pytest.MonkeyPatch, bad_ranks: list[int]
) -> None:
    monkeypatch.setattr(distributed, "_GRACE_PERIOD", 30.0 if len(bad_ranks) > 1 else 0.2)

    def train(strategy: Strategy) -> list[str | None]:
        rank = strategy.group.rank
        model = normed().double()
        trainer = toys.trainer_of(Classification(3), batches(1), model=model, strategy=strategy)
        update = next(trainer.draw(0))
        told = None
        if rank in bad_ranks:
            # The loss of the first process is not finite, and a sample of the second.
            where = update[0].batch[0] if rank else model[0].weight.data
            where[0] = float("nan")
            with pytest.raises(DivergedError) as error:
                trainer.update(update)
            told = str(error.value)
        else:
            trainer.update(update)
        # What the others do meanwhile is a collective of their own.
        return strategy.group.gather(told)

    for told in ranks(2, in_group(train, kind=Alone)):
        for rank, message in enumerate(told):
            assert (message is not None) == (rank in bad_ranks)
            assert message is None or "holds NaN" in message


class Infinite(nn.Module):
    """An infinite value whose gradient is finite: it is added."""

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        return nn.functional.cross_entropy(output[:, :3], target) + output[:, 3].mean()


class Network(nn.Module):
    """Logits, of which one class more says that the loss is infinite."""

    def __init__(self, inputs: int = 5) -> None:
        super().__init__()
        self.layer = nn.Linear(inputs, 3)

    def forward(self, x: Tensor) -> Tensor:
        infinite = torch.where(x[:, :1] > 50, torch.inf, 0.0).to(x)
        return torch.cat([self.layer(x), infinite], 1)


def test_an_infinite_loss_with_a_finite_gradient_stops_the_run() -> None:
    model = Network(4)
    data = batches(5)
    data[0][0][1, 0] = 100.0
    before = copy.deepcopy(model.state_dict())
    task = Classification(4, Infinite(), metrics={})
    trainer = toys.trainer_of(task, data, model=model, precision="fp32")

    with pytest.raises(DivergedError, match="the loss is not finite"):
        trainer.fit()
    assert trainer.state.global_step == 0
    assert differences(before, model.state_dict()) == []


def train_split(strategy, on_nonfinite="skip", accumulation=1):
    """Train an epoch; return the weights, the counters and what it ended with."""
    torch.manual_seed(0)
    data = points(21)  # the last update has one sample: one of two processes borrows it
    data.x[9, 0] = 100.0  # the loss does not like it
    trainer = toys.trainer_of(
        Classification(4, Infinite(), metrics={}),
        loader(data, accumulation, 4, shuffled=False, strategy=strategy),
        model=Network().double(),
        make=partial(torch.optim.AdamW, lr=0.05),
        strategy=strategy,
        max_epochs=1,
        on_nonfinite=on_nonfinite,
        log_every_n_steps=1,
    )
    error = ""
    try:
        trainer.fit()
    except DivergedError as caught:
        error = str(caught)
    weights = {name: p.detach() for name, p in trainer.model.named_parameters()}
    weights = strategy.group.broadcast(strategy.gather_tensors(weights))
    counters = trainer.state.state_dict()
    del counters["micro_batches"]
    return {n: w.clone() for n, w in weights.items()}, counters, error


CASES = [("skip", 1), ("skip", 2), ("stop", 1)]


@pytest.mark.parametrize("kind", [DDP, FSDP])
def test_several_processes_skip_the_same_updates(ranks, kind):
    def run(strategy):
        return {case: train_split(strategy, *case) for case in CASES}

    alone = run(Strategy("cpu"))

    for _, counters, error in alone.values():
        assert error or (counters["global_step"], counters["skipped_updates"]) == (5, 1)
    assert "the loss is not finite, at update 3" in alone["stop", 1][2]
    for results in ranks(2, in_group(run, kind)):
        for case, (weights, counters, error) in results.items():
            assert counters == alone[case][1]
            assert error[:40] == alone[case][2][:40]
            for name, weight in weights.items():
                assert torch.isfinite(weight).all()
                torch.testing.assert_close(weight, alone[case][0][name], rtol=0, atol=1e-10)
