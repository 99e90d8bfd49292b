"""A non-finite update changes nothing; the device's guard ends with the state of the host's."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import toys
from callbacks.checkpoint import Checkpoint
from callbacks.ema import EMA
from callbacks.swa import SWA
from toys import ON_DEVICE, Log, batches, differences, in_group, loader, normed, points
from trainer import snapshot
from trainer.callback import Callback
from trainer.checkpoints.reader import read_checkpoint
from trainer.checkpoints.store import CheckpointStore
from trainer.errors import DivergedError
from trainer.optimizers.optimizers import build_optimizers
from trainer.options import GradientNoise, TrainerOptions
from trainer.strategies.ddp import DDP
from trainer.strategies.fsdp import FSDP
from trainer.strategies.strategy import Strategy
from trainer.tasks.classification import Classification
from trainer.trainer import Trainer
from trainer.update import gradients, sums

NODES = toys.optimizer_nodes() | {
    "rprop": {"_target_": "torch.optim.Rprop"},
    "asgd": {"_target_": "torch.optim.ASGD", "t0": 1},
    "adadelta": {"_target_": "torch.optim.Adadelta"},
    "adamax": {"_target_": "torch.optim.Adamax"},
}
EACH = pytest.mark.parametrize("name", list(NODES))
UPDATES = 6  # of an epoch


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Callable[[bool], None]:
    """Return a function that makes the CPU a device that the host waits for, or not."""

    def decide(waits):
        for module in (sums, gradients):
            monkeypatch.setattr(module, "waits", lambda device: waits)

    return decide


@pytest.fixture(params=[False, True], ids=["cpu", "as-on-a-gpu"])
def device(request: pytest.FixtureRequest, gpu: Callable[[bool], None]) -> None:
    """Whether reading a number of the device is taken to cost a wait."""
    gpu(request.param)


def trainer_of(
    name: str, folder: Path, data: list[Any] | None = None, more: Any = None, **options: Any
) -> Trainer:
    """Build a trainer with whatever has a state around the optimizer, as for a GPU."""
    model = normed()
    optimizers = build_optimizers(model, copy.deepcopy(NODES[name]), prefer_fused=True)
    first = next(iter(optimizers.optimizers.values()))
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
        callbacks={**callbacks, **(more or {})},
        options=TrainerOptions(**({} if name == "lbfgs" else free) | options),  # type: ignore[arg-type]
        run_dir=folder,
    )


def changed_by_updates(trainer: Trainer) -> dict[str, Any]:
    """Return what an update that is left out must not change."""
    state = snapshot.take(trainer)
    return {"model": state["model"], "optimizer": state["optimizer"]}


def saved(folder: Path) -> dict[str, Any]:
    store = CheckpointStore(folder / "checkpoints")
    paths = sorted(store.folder.glob("step-*.pt"))
    return {p.name: {**read_checkpoint(p), "config": ""} for p in paths}


def test_a_scaled_loss_is_checked_on_the_host(gpu: Callable[[bool], None]) -> None:
    gpu(True)
    model = normed()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    trainer = Trainer(model, Classification(3), optimizer, batches(UPDATES), precision="fp16")
    assert not trainer.updater.guard.by_device


@EACH
def test_a_whole_run_is_the_same(name: str, gpu: Callable[[bool], None], tmp_path: Path) -> None:
    runs = {}
    for waits in (False, True):
        gpu(waits)
        trainer = trainer_of(name, tmp_path / str(waits))
        begun = changed_by_updates(trainer)
        trainer.fit()
        assert differences(begun, changed_by_updates(trainer))  # LBFGS once did nothing at all
        log = trainer.callbacks["log"].lines  # type: ignore[attr-defined]
        runs[waits] = {"log": log, "saved": saved(tmp_path / str(waits))}
        assert set(runs[waits]["saved"]) >= {"step-00000004.pt", "step-00000012.pt"}
    assert differences(runs[False], runs[True]) == []


@pytest.mark.parametrize("name", sorted(ON_DEVICE))
@pytest.mark.parametrize("bad", [0, 4])
def test_a_bad_update_ends_both_in_the_same_place(
    name: str, bad: int, gpu: Callable[[bool], None], tmp_path: Path
) -> None:
    runs = {}
    for waits in (False, True):
        gpu(waits)
        folder = tmp_path / str(waits)
        trainer = trainer_of(name, folder, batches(UPDATES, bad), log_every_n_steps=6)
        with pytest.raises(DivergedError, match=rf"update {bad + 1} \(step {bad + 1}, epoch 0\)"):
            trainer.fit()
        assert trainer.state.global_step == bad
        assert trainer.updater.guard.by_device == waits
        log = trainer.callbacks["log"].lines  # type: ignore[attr-defined]
        runs[waits] = {**changed_by_updates(trainer), "log": log, "saved": saved(folder)}
    # The host had let the schedule go on: the only thing that is not undone.
    rates = [path for path in differences(runs[False], runs[True]) if path.endswith("/lr")]
    assert differences(runs[False], runs[True]) == rates


@EACH
def test_after_a_first_update_left_out_the_rest_is_undisturbed(
    name: str, gpu: Callable[[bool], None], tmp_path: Path
) -> None:
    gpu(True)
    good = batches(UPDATES)
    options = {"on_nonfinite": "skip", "max_epochs": 1, "gradient_noise": None}
    options |= {"gradient_accumulation_steps": 2}
    whole = trainer_of(name, tmp_path / "whole", good, **options)
    whole.fit()
    bad = (torch.full_like(good[0][0], float("nan")), good[0][1])
    disturbed = trainer_of(name, tmp_path / "disturbed", [bad, *good], **options)
    disturbed.fit()
    state = disturbed.state
    assert (state.global_step, state.skipped_updates) == (UPDATES, 1)
    assert disturbed.metrics["train/skipped_updates"] == 1
    before, after = snapshot.take(whole), snapshot.take(disturbed)
    for key in ("model", "optimizer", "ema", "lr_scheduler"):
        assert differences(before[key], after[key]) == []


class Observer(Callback):
    """Look at the model."""

    def on_fit_end(self, trainer: Trainer) -> None:
        raise AssertionError

    on_validation_start = on_epoch_end = on_fit_end


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"validate_every_n_steps": 4}, id="validation"),
        pytest.param({}, id="epoch"),
        pytest.param({"max_steps": 4}, id="end"),
    ],
)
def test_nothing_looks_at_a_run_whose_device_left_an_update_out(
    options: dict[str, Any], gpu: Callable[[bool], None], tmp_path: Path
) -> None:
    gpu(True)
    data, options = batches(UPDATES, bad=2), {"log_every_n_steps": 99, **options}
    trainer = trainer_of("adamw", tmp_path, data, {"observer": Observer()}, **options)
    with pytest.raises(DivergedError, match="update 3"):
        trainer.fit()


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


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize("infinite", [False, True], ids=["a sample", "with a finite gradient"])
def test_stopping_names_the_sample_and_keeps_finite_weights(infinite: bool) -> None:
    def made(data: Any) -> Trainer:
        torch.manual_seed(0)
        model = Network(4) if infinite else normed()
        task = Classification(4, Infinite(), metrics={}) if infinite else Classification(3)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        return Trainer(model, task, optimizer, data, options=TrainerOptions(max_epochs=1))

    data = batches(5, bad=None if infinite else 2)
    if infinite:
        data[2][0][1, 0] = 100.0
    trainer, short = made(data), made(data[:2])
    told = "the loss is not finite" if infinite else "sample 3 holds NaN"
    with pytest.raises(DivergedError, match=rf"{told}.*update 3") as error:
        trainer.fit()
    assert error.value.exit_code == 5
    assert trainer.state.global_step == 2
    short.fit()
    assert differences(changed_by_updates(trainer), changed_by_updates(short)) == []


def train_split(strategy, on_nonfinite="skip", accumulation=1):
    """Train an epoch; return the weights, the counters and what it ended with."""
    torch.manual_seed(0)
    model = strategy.prepare(Network().double())
    data = points(21)  # the last update has one sample: one of two processes borrows it
    data.x[9, 0] = 100.0  # the loss does not like it
    trainer = Trainer(
        model,
        Classification(4, Infinite(), metrics={}),
        torch.optim.AdamW(model.parameters(), lr=0.05),
        loader(data, accumulation, 4, shuffled=False, strategy=strategy),
        strategy=strategy,
        precision="fp64",
        options=TrainerOptions(max_epochs=1, on_nonfinite=on_nonfinite, log_every_n_steps=1),
    )
    error = ""
    try:
        trainer.fit()
    except DivergedError as caught:
        error = str(caught)
    weights = strategy.gather_tensors({n: p.detach() for n, p in model.named_parameters()})
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
