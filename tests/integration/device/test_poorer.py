"""A device that is poorer than CUDA: what it lacks is found by asking it, and a run does without.

`SIM_LACKS` takes things away from the simulated one; tests/integration/test_accelerator.py does so.
"""

import os

import pytest
import torch
from torch import nn

from accelerator import CPU, DEVICE, needs_simulation
from regimen import load_run
from regimen.conf.check import parse
from regimen.data.batch import to_device
from regimen.scripts.composition.compose import compose
from regimen.scripts.doctor import of_driver
from regimen.trainer import device as asked
from regimen.trainer.assembly.experiment import build
from regimen.trainer.errors import DivergedError, ModelError
from regimen.trainer.media import histogram_of
from regimen.trainer.optimizers.optimizers import build_optimizers
from regimen.trainer.options import TrainerOptions
from regimen.trainer.strategies.multi_process import check_processes
from regimen.trainer.strategies.strategy import Strategy
from regimen.trainer.tasks.classification import Classification
from regimen.trainer.trainer import Trainer
from toy_pictures import write_digits
from toys import Log

pytestmark = needs_simulation
LACKS = set(os.environ.get("SIM_LACKS", "").split(","))
SHORT = [
    "trainer.max_epochs=2",
    "trainer.limit_train_batches=3",
    "trainer.limit_val_batches=2",
    "trainer.log_every_n_steps=2",
    "loader.batch_size=8",
    "loader.eval_batch_size=16",
]


def test_each_question_has_an_answer_of_its_own():
    streams = "streams" not in LACKS
    assert asked.has_streams(DEVICE) == streams
    assert asked.pins(DEVICE) == (streams and "pinned" not in LACKS)
    assert asked.supports_collectives(DEVICE) == ("collectives" not in LACKS)
    assert not asked.supports_collectives(DEVICE, "gloo")
    assert asked.counts_memory(DEVICE) == ("statistics" not in LACKS)
    wide = torch.float32 if "float64" in LACKS else torch.float64
    assert asked.accumulate_dtype(DEVICE) == asked.accumulate_dtype(torch.device("sim")) == wide
    (first, _) = asked.describe_all()
    assert first.startswith("sim:0 simulated accelerator")
    assert ("GiB" in first) == ("statistics" not in LACKS)
    assert "CPU" not in of_driver(None, works=True)[0]


def trained(words, device):
    """Train as a configuration says; return the weights and what is logged."""
    log = Log()
    strategy = Strategy(device)
    strategy.setup()
    composed = compose([*words[:1], *SHORT, *words[1:]])
    trainer = build(parse(composed.config), strategy, {"log": log}).trainer
    trainer.fit()
    apart = ("time", "memo")  # facts of this machine
    lines = [{k: v for k, v in line.items() if k[:4] not in apart} for _, line in log.lines]
    return {n: t.cpu() for n, t in trainer.model.state_dict().items()}, lines


@pytest.mark.parametrize(
    "words",
    [
        pytest.param(
            [
                "experiment=resnet18",
                "model=small_cnn",
                "model.widths=[4,8]",
                "loader.num_workers=2",
                "loader.pin_memory=true",
                "callbacks=[ema]",
                "transforms=on_device",
                "task/metrics=per_class",
            ],
            id="digits",
        ),
        pytest.param(["experiment=regression", "loader.num_workers=0"], id="regression"),
        pytest.param(
            ["experiment=segmentation", "model.width=4", "loader.num_workers=0"], id="segmentation"
        ),
    ],
)
def test_it_trains_as_the_cpu(words):
    weights, lines = trained(words, DEVICE)
    expected, plain = trained(words, CPU)
    torch.testing.assert_close(weights, expected, rtol=1e-3, atol=1e-4)
    assert lines == [pytest.approx(line, rel=1e-3, abs=1e-4, nan_ok=True) for line in plain]


@pytest.mark.parametrize("own", [False, True], ids=["preferred", "asked for"])
@pytest.mark.parametrize("name", ["SGD", "AdamW"])
def test_an_update_that_is_not_finite_is_not_applied(name, own):
    if own and "fused" in LACKS:
        pytest.skip("an optimizer that the device has no kernel for is refused by torch")
    model = nn.Linear(4, 3).to(DEVICE)
    node = {"_target_": f"torch.optim.{name}", "lr": 0.1}
    optimizers = build_optimizers(
        model, node | ({"fused": True} if own else {}), not own, batch_size=8
    )
    (optimizer,) = optimizers.optimizers.values()
    heeds = not {"fused", "found_inf"} & LACKS
    assert bool(optimizer.defaults["fused"]) == (own or heeds)
    good = torch.randn(8, 4)
    labels = torch.zeros(8).long()
    bad = torch.where(torch.arange(8)[:, None] == 3, torch.nan, good)
    batches = [(inputs.to(DEVICE), labels.to(DEVICE)) for inputs in (good, bad, good)]
    options = TrainerOptions(max_epochs=1, log_every_n_steps=3)
    parts = Classification(3), optimizers, batches
    trainer = Trainer(model, *parts, strategy=Strategy(DEVICE), options=options)
    with pytest.raises(DivergedError, match=r"update 2 .*was not applied"):
        trainer.fit()
    assert trainer.state.global_step == 1
    assert all(p.isfinite().all() for p in model.parameters())
    assert trainer.updater.guard.is_deferred == heeds


def test_a_whole_run_and_what_it_is_used_for(train, job, tmp_path):
    """With all that a run has by default, a resume, and answers."""
    run = tmp_path / "run"
    words = [*job, "model.widths=[4,8]", f"run_dir={run}"]
    done = train(words)
    assert "sim:0" in done.err
    train([*words, "trainer.max_epochs=3", "resume=auto", "resume_policy=override"])
    train([f"run={run}"], command="evaluate")
    source = write_digits(tmp_path / "pictures", {"": 1})
    train([f"run={run}", f"source={source}", f"out={tmp_path}/p.csv"], command="predict")
    assert (tmp_path / "p.csv").read_text().count("\n") > 1


def test_text_is_sampled(train, tmp_path):
    words = ["experiment=char_lm", "model.dim=16", "model.depth=1", "data.context=16"]
    train([*words, "trainer.max_steps=3", f"run_dir={tmp_path / 'run'}"])
    (written,) = load_run(tmp_path / "run").generate(["a"], max_new_tokens=5, sampling="random")
    assert len(written) >= 5


def test_a_backend_that_does_not_connect_the_devices_is_refused(train):
    words = ["experiment=resnet18", "strategy=ddp", "strategy.devices=2", "strategy.backend=gloo"]
    if "collectives" in LACKS:
        check_processes(2, "auto", "gloo")  # which connects the host's processes instead
        with pytest.raises(ModelError, match=r"accelerator: torch\.distributed has no backend"):
            check_processes(2, "sim")
    else:
        done = train(words, 2)
        assert "strategy.backend: gloo does not connect devices of the kind sim" in done.error
        assert "auto takes simccl" in done.error
        check_processes(2, "auto", "simccl")
        check_processes(2, "cpu", "gloo")


def test_numbers_of_the_user_in_double_precision_arrive():
    batch = to_device(
        (torch.ones(3, dtype=torch.float64), torch.zeros(2, dtype=torch.int64)), DEVICE
    )
    assert batch[0].dtype == asked.accumulate_dtype(DEVICE)
    assert batch[1].dtype == torch.int64
    counts, edges, *_ = histogram_of(torch.tensor([0.0, 1.0, 1.0], device=DEVICE), bins=2)
    assert sorted(map(len, (counts, edges))) == [2, 3]


def test_sums_of_counts_are_exact():
    """In single precision 2^24 + 1 is 2^24."""
    from regimen.trainer.update.means import MeanAccumulator, MeanKey, metric_key

    sums = MeanAccumulator(DEVICE)
    sums.add(MeanKey("loss", ""), torch.ones((), device=DEVICE), 2**24 + 1, mean=True)
    sums.add(MeanKey("loss", ""), torch.zeros((), device=DEVICE), 2**24 + 1, mean=True)
    assert sums.means(lambda tensor: tensor)["loss"] == 0.5
    sums.add(metric_key("hits"), 2**24 + 1, 1)
    assert sums.means(lambda tensor: tensor)["hits"] == 2**24 + 1
