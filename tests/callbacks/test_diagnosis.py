"""What looks into a run: rates, speed, memory, summary, profiler, range test, histograms."""

import json
import logging
import math
from types import SimpleNamespace

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from regimen.callbacks.checkpoint import Checkpoint
from regimen.callbacks.histograms import Histograms
from regimen.callbacks.lr_finder import LRFinder
from regimen.callbacks.lr_monitor import LRMonitor
from regimen.callbacks.memory import Memory
from regimen.callbacks.model_summary import ModelSummary
from regimen.callbacks.profiler import Profiler
from regimen.callbacks.support import CallbackError
from regimen.callbacks.tensorboard import TensorBoard
from regimen.callbacks.throughput import Throughput
from regimen.data.batch import BatchSlice, MicroBatch
from regimen.trainer.device import peak_rss
from regimen.trainer.errors import DivergedError
from regimen.trainer.lr_schedulers.schedule import LRSchedule
from regimen.trainer.media import histogram_of
from regimen.trainer.state import TrainState
from regimen.trainer.task import StepOutput
from toys import Log, StopAt


class TwoHeads(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.digit = torch.nn.Linear(4, 3).double()
        self.parity = torch.nn.Linear(4, 1).double()

    def forward(self, inputs, /, *, scale):
        digit = self.digit(inputs * scale)
        parity = self.parity(inputs)
        return {"digit": digit, "parity": parity}


def test_a_summary_shows_shapes_and_changes_nothing(make_trainer, caplog):
    with_it = make_trainer({"summary": ModelSummary()})
    without = make_trainer({})
    with caplog.at_level(logging.INFO):
        with_it.fit()
    without.fit()

    for shown in ("BatchNorm1d", "N x 8", "74 parameters"):
        assert shown in caplog.text
    assert "failed" not in caplog.text

    weights = with_it.model.state_dict()
    for name, value in without.model.state_dict().items():
        assert torch.equal(weights[name], value)


def test_a_summary_calls_the_model_as_the_task_does(make_trainer, caplog):
    trainer = make_trainer({"summary": ModelSummary()}, model=TwoHeads(), validated=False)

    def training_step(model, batch):
        inputs, _ = batch
        made = model(inputs, scale=2.0)  # which model(inputs) does not know
        return StepOutput(made["digit"].mean(1) + made["parity"].mean(1))

    trainer.task.training_step = training_step
    with caplog.at_level(logging.INFO):
        trainer.fit()

    assert "N x 3, N x 1" in caplog.text
    assert "failed" not in caplog.text


def test_profiler_writes_a_trace_and_a_table(make_trainer, tmp_path):
    table = tmp_path / "profile.txt"
    make_trainer({"profiler": Profiler(wait=1, warmup=1, active=50)}, tmp_path).fit()
    assert not table.exists()  # it ends with a run that is too short

    make_trainer({"profiler": Profiler(wait=1, warmup=1, active=2)}, tmp_path).fit()
    (path,) = (tmp_path / "tensorboard" / "profile").glob("*.pt.trace.json")
    trace = json.loads(path.read_text())
    names = {event.get("name") for event in trace["traceEvents"]}

    assert "aten::addmm" in names
    assert "aten::addmm" in table.read_text()


def test_range_test_also_when_it_goes_on_after_a_resume(make_trainer, tmp_path, carry_over):
    def trainer(run, **more):
        finder = LRFinder(min_lr=1e-5, max_lr=1e-1, updates=9)
        callbacks = {
            "finder": finder,
            "rates": LRMonitor(),
            **more,
        }
        options = {"scheduler": torch.optim.lr_scheduler.ConstantLR, "max_epochs": 50}
        return make_trainer(callbacks, tmp_path / run, log_every_n_steps=1, **options)

    log = Log()
    whole = trainer("whole", log=log)
    whole.fit()
    (name,) = whole.learning_rates()
    used = list(log.of(f"lr/{name}").values())
    report = (tmp_path / "whole/lr_finder.json").read_text()
    found = json.loads(report)

    assert whole.state.updates == 9
    assert used == pytest.approx([10 ** (-5 + i / 2) for i in range(9)])
    assert found["lr"] == pytest.approx(used)
    assert len(found["loss"]) == 9
    assert found["suggestion"] in found["lr"]

    for cut in (4, 9):
        first = trainer(f"cut{cut}", stop=StopAt(cut))
        second = trainer(f"cut{cut}")
        first.fit()
        carry_over(first, second)
        second.fit()
        assert (tmp_path / f"cut{cut}/lr_finder.json").read_text() == report
        assert second.state.updates == 9


def test_a_range_test_needs_the_loss_of_every_update(make_trainer):
    trainer = make_trainer({"finder": LRFinder()})
    with pytest.raises(CallbackError, match=r"log_every_n_steps=1"):
        trainer.fit()


def test_no_weights_of_a_range_test_are_the_best(make_trainer, tmp_path):
    saver = Checkpoint(monitor="train/loss", mode="min", every_n_steps=2, save_weights=True)
    finder = LRFinder(min_lr=1e-5, max_lr=1e-1, updates=8)
    options = {"max_epochs": 50, "log_every_n_steps": 1}
    make_trainer({"finder": finder, "checkpoint": saver}, tmp_path, **options).fit()

    assert saver.best_result() is None

    names = {path.name for path in (tmp_path / "checkpoints").iterdir()}
    assert "last.pt" in names
    assert not [name for name in names if name.startswith("best")]


@pytest.fixture
def range_test(make_trainer, tmp_path):
    """Return a function that makes a range test of 40 updates up to a rate, and its trainer."""

    def make(highest, **options):
        finder = LRFinder(min_lr=highest / 1e9, max_lr=highest, updates=40, **options)
        callbacks = {"finder": finder}
        return finder, make_trainer(callbacks, tmp_path, max_epochs=50, log_every_n_steps=1)

    return make


def test_range_test_ends_and_reports_when_the_loss_explodes(range_test, tmp_path):
    finder, trainer = range_test(1e6, smoothing=0.0)
    trainer.fit()
    report = json.loads((tmp_path / "lr_finder.json").read_text())

    assert trainer.state.updates < 40
    assert finder.losses[-1] > 4 * min(finder.losses)
    assert report["loss"]


def test_range_test_reports_when_the_training_diverges(range_test, tmp_path):
    _, trainer = range_test(1e300, stop_factor=math.inf)
    with pytest.raises(DivergedError):
        trainer.fit()

    report = json.loads((tmp_path / "lr_finder.json").read_text())
    assert trainer.state.updates < 40
    assert report["loss"]


@pytest.mark.parametrize(
    ("smoothing", "losses", "expected"),
    [
        pytest.param(0.0, [5.0, 4.5, 2.0, 1.9, 9.0], 2, id="the steepest descent"),
        pytest.param(0.0, [1.0, 2.0, 3.0, 4.0, 5.0], None, id="none"),
        pytest.param(0.5, [4.0, 3.0, 2.9, 2.9, 2.9], 1, id="smoothed from its start on"),
    ],
)
def test_suggestion(smoothing, losses, expected):
    finder = LRFinder(smoothing=smoothing)
    finder.rates = [1, 2, 3, 4, 5]
    finder.losses = losses
    assert finder.suggestion() == expected


def test_histograms_are_logged_at_the_ends_of_epochs(make_trainer, tmp_path):
    callbacks = {"histograms": Histograms(bins=8), "tensorboard": TensorBoard()}
    trainer = make_trainer(callbacks, tmp_path)
    trainer.fit()
    place = str(tmp_path / "tensorboard")
    board = EventAccumulator(place, size_guidance={"histograms": 0})  # all of them
    board.Reload()

    tags = []
    for name, _ in trainer.model.named_parameters():
        tags += [f"gradients/{name}", f"weights/{name}"]
    shown = board.Tags()["histograms"]

    assert sorted(shown) == sorted(tags)

    first, second = board.Histograms("weights/0.weight")
    last = second.histogram_value
    weight = trainer.model[0].weight.detach()

    assert first.step == 5
    assert second.step == 10
    assert last.num == weight.numel()
    assert last.sum == pytest.approx(weight.sum().item())
    assert last.max == pytest.approx(weight.max().item())


def test_rates_are_those_of_the_last_update_and_memory_is_that_of_epochs(make_trainer, tmp_path):
    def halve(optimizer):
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        return LRSchedule.wrap(scheduler, "step")

    log = Log()
    callbacks = {
        "log": log,
        "lr": LRMonitor(),
        "memory": Memory(),
    }
    trainer = make_trainer(callbacks, tmp_path, lr=1e-2, scheduler=halve)
    trainer.fit()

    (name,) = trainer.learning_rates()
    expected = {step: 1e-2 * 0.5 ** (step - 1) for step in (2, 4, 5, 6, 8, 10)}

    assert log.of(f"lr/{name}") == pytest.approx(expected)

    peaks = log.of("memory/peak_rss_mib")
    assert list(peaks) == [5, 10]
    assert peaks[10] == pytest.approx(peak_rss() / 2**20, rel=0.1)


def test_histogram_of_values_that_are_not_finite():
    values = torch.tensor([1.0, math.nan, 3.0, math.inf])
    histogram = histogram_of(values, bins=2)

    assert histogram.counts.tolist() == [1, 1]
    assert histogram.total == 4.0
    assert histogram.squares == 10.0


def test_histogram_of_no_finite_value():
    values = torch.tensor([math.nan])
    histogram = histogram_of(values, bins=2)
    assert histogram.counts.tolist() == [0, 0]


def test_throughput_of_an_interval_and_a_hint_that_comes_once(caplog):
    state = TrainState(samples=100, updates=5)
    timer = SimpleNamespace(total=4.0, data=1.0)
    trainer = SimpleNamespace(state=state, timer=timer)
    callback = Throughput(hint_share=0.3)
    callback.on_fit_start(trainer)

    assert callback.scalars(trainer) == {}

    shown = []
    with caplog.at_level(logging.INFO):
        for waited in (3.6, 1.0, 1.68, 2.0):  # of the first it says nothing
            state.samples += 80
            state.updates += 10
            timer.data = waited
            shown.append(callback.scalars(trainer))
    assert shown[1] == {
        "time/samples_per_second": 20.0,
        "time/step_seconds": 0.4,
        "time/data_wait": 0.1,
        "time/data_share": 0.25,
    }

    hint = "42% of the time is spent waiting for data: set loader.num_workers=auto"
    assert [record.getMessage() for record in caplog.records] == [hint]


class Detector(torch.nn.Module):
    """Answers for a list of pictures, as torchvision's detectors do."""

    def __init__(self):
        super().__init__()
        self.body = torch.nn.Conv2d(3, 2, 1).double()

    def forward(self, pictures):
        maps = self.body(torch.stack(pictures))
        return maps.mean((1, 2, 3))


def test_a_summary_of_pictures_in_a_list_counts_samples(make_trainer, caplog):
    pictures = list(torch.rand(4, 3, 8, 8, dtype=torch.float64))
    trainer = make_trainer({}, model=Detector(), validated=False)
    micro_batch = MicroBatch((pictures,), BatchSlice((), 4, 0, 4, 0, 1, 0, 0))
    vars(trainer)["draw"] = lambda epoch: iter([[micro_batch]])
    with caplog.at_level(logging.INFO):
        ModelSummary().on_fit_start(trainer)

    assert "N x 2 x 8 x 8" in caplog.text
    assert "a sample takes 768FLOPs" in caplog.text  # 2 * 3 * 2 * 64
