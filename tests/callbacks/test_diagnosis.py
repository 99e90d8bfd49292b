"""Tests of what looks into a run: summary, profiler, range test, dump, histograms."""

import json
import logging
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from google.protobuf.descriptor_pb2 import FieldDescriptorProto, FileDescriptorProto
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message_factory import GetMessageClass
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from callbacks.histograms import Histograms
from callbacks.lr_finder import LRFinder, smoothed
from callbacks.model_summary import ModelSummary
from callbacks.profiler import Profiler
from callbacks.state_dump import StateDump
from callbacks.support.errors import CallbackError
from callbacks.support.xplane import xspace
from callbacks.tensorboard import TensorBoard
from trainer.callback import Callback
from trainer.errors import DivergedError
from trainer.media import histogram_of


def test_summary_shows_shapes_and_changes_nothing(make_trainer: Any, caplog: Any) -> None:
    with_it, without = make_trainer({"summary": ModelSummary()}), make_trainer({})
    with caplog.at_level(logging.INFO):
        with_it.fit()
    without.fit()
    assert "BatchNorm1d" in caplog.text
    assert "N x 8" in caplog.text
    assert "74 parameters" in caplog.text
    for name, value in without.model.state_dict().items():
        assert torch.equal(with_it.model.state_dict()[name], value)


def test_summary_leaves_the_random_state_alone(make_trainer: Any) -> None:
    loader = torch.utils.data.DataLoader(
        torch.utils.data.TensorDataset(torch.randn(8, 4).double(), torch.randn(8, 2).double()),
        batch_size=4,
        shuffle=True,
    )
    trainer = make_trainer({"summary": ModelSummary()}, batches=loader)
    torch.manual_seed(0)
    trainer.callbacks["summary"].on_fit_start(trainer)
    drawn = torch.rand(3)
    torch.manual_seed(0)
    assert torch.equal(torch.rand(3), drawn)


def test_profiler_writes_a_trace_and_a_table(make_trainer: Any, tmp_path: Path) -> None:
    profiler = Profiler(wait=1, warmup=1, active=2)
    make_trainer({"profiler": profiler}, tmp_path).fit()
    (trace,) = (tmp_path / "tensorboard" / "profile").glob("*.pt.trace.json")
    names = {event.get("name") for event in json.loads(trace.read_text())["traceEvents"]}
    assert "aten::addmm" in names
    assert "aten::addmm" in (tmp_path / "profile.txt").read_text()


def test_a_trace_is_in_the_profile_tab_as_well(make_trainer: Any, tmp_path: Path) -> None:
    make_trainer({"profiler": Profiler(wait=1, warmup=1, active=2)}, tmp_path).fit()
    (trace,) = (tmp_path / "tensorboard" / "profile").glob("*.pt.trace.json")
    (found,) = (tmp_path / "tensorboard" / "plugins" / "profile" / "step-00000004").iterdir()
    events = [e for e in json.loads(trace.read_text())["traceEvents"] if e.get("ph") == "X"]
    space = xspace_message()
    space.ParseFromString(found.read_bytes())
    (plane,) = space.planes
    assert plane.name == "/host:CPU"
    names = {entry.key: entry.value.name for entry in plane.event_metadata}
    begin = plane.lines[0].timestamp_ns
    read = sorted(
        (names[e.metadata_id], begin / 1e3 + e.offset_ps / 1e6, e.duration_ps / 1e6)
        for line in plane.lines
        for e in line.events
    )
    told = sorted((e["name"], float(e["ts"]), float(e["dur"])) for e in events if e["dur"] > 0)
    assert [name for name, *_ in read] == [name for name, *_ in told]
    assert "aten::addmm" in names.values()
    for (_, *mine), (_, *theirs) in zip(read, told, strict=True):
        assert mine == pytest.approx(theirs, rel=1e-12, abs=2e-3)  # begins are in nanoseconds


def xspace_message() -> Any:
    """Return an empty XSpace, as protobuf reads it: the fields by their published numbers."""
    kinds = FieldDescriptorProto
    file = FileDescriptorProto(name="xplane.proto", package="x")

    def message(called: str, /, **fields: tuple[int, Any]) -> None:
        added = file.message_type.add(name=called)
        for field, (number, kind) in fields.items():
            many = isinstance(kind, str) and not kind.startswith("one ")
            label = kinds.LABEL_REPEATED if many else kinds.LABEL_OPTIONAL
            made = added.field.add(name=field, number=number, label=label)
            if isinstance(kind, str):
                made.type, made.type_name = kinds.TYPE_MESSAGE, f".x.{kind.removeprefix('one ')}"
            else:
                made.type = kind

    whole, text = kinds.TYPE_INT64, kinds.TYPE_STRING
    message("Space", planes=(1, "Plane"))
    metadata = {"event_metadata": (4, "Entry")}  # a map is a list of entries
    message("Plane", id=(1, whole), name=(2, text), lines=(3, "Line"), **metadata)
    message("Line", id=(1, whole), name=(2, text), timestamp_ns=(3, whole), events=(4, "Event"))
    message("Event", metadata_id=(1, whole), offset_ps=(2, whole), duration_ps=(3, whole))
    message("Entry", key=(1, whole), value=(2, "one Name"))
    message("Name", id=(1, whole), name=(2, text))
    pool = DescriptorPool()
    pool.Add(file)
    return GetMessageClass(pool.FindMessageTypeByName("x.Space"))()


def test_events_of_a_device_are_on_its_own_plane() -> None:
    common = {"ph": "X", "ts": 10.5, "dur": 2.0}
    kernel = {**common, "cat": "kernel", "name": "gemm", "pid": 0, "tid": 7}
    launch = {**common, "cat": "cuda_runtime", "name": "launch", "pid": 99, "tid": 99}
    space = xspace_message()
    space.ParseFromString(xspace({"traceEvents": [kernel, launch, {"ph": "M"}]}, "here"))
    found = {plane.name: [line.name for line in plane.lines] for plane in space.planes}
    assert found == {"/host:CPU": ["thread 99"], "/device:GPU:0": ["Stream #7"]}


def test_profiler_ends_with_a_run_that_is_too_short(make_trainer: Any, tmp_path: Path) -> None:
    make_trainer({"profiler": Profiler(wait=1, warmup=1, active=50)}, tmp_path).fit()
    assert not (tmp_path / "profile.txt").exists()
    make_trainer({"profiler": Profiler(wait=1, warmup=1, active=2)}, tmp_path).fit()
    assert (tmp_path / "profile.txt").exists()  # the first one is over


class Rates(Callback):
    """Note the rate that each update uses."""

    def __init__(self) -> None:
        self.used: list[float] = []

    def on_fit_start(self, trainer: Any) -> None:
        self._next = next(iter(trainer.learning_rates().values()))

    def on_update_end(self, trainer: Any) -> None:
        self.used.append(self._next)
        self._next = next(iter(trainer.learning_rates().values()))


def test_range_test(make_trainer: Any, tmp_path: Path) -> None:
    finder, rates = LRFinder(min_lr=1e-5, max_lr=1e-1, updates=9), Rates()
    constant = lambda optimizer: torch.optim.lr_scheduler.ConstantLR(optimizer)  # noqa: E731
    callbacks = {"finder": finder, "rates": rates}
    trainer = make_trainer(
        callbacks, tmp_path, max_epochs=50, log_every_n_steps=1, scheduler=constant
    )
    trainer.fit()
    assert trainer.state.updates == 9
    assert rates.used == pytest.approx([10 ** (-5 + i / 2) for i in range(9)])
    found = json.loads((tmp_path / "lr_finder.json").read_text())
    assert found["lr"] == pytest.approx(rates.used)
    assert len(found["loss"]) == 9
    assert found["suggestion"] in found["lr"]


def test_range_test_stops_when_the_loss_explodes(make_trainer: Any, tmp_path: Path) -> None:
    finder = LRFinder(min_lr=1e-3, max_lr=1e6, updates=40, smoothing=0.0)
    trainer = make_trainer({"finder": finder}, tmp_path, max_epochs=50, log_every_n_steps=1)
    trainer.fit()
    assert trainer.state.updates < 40
    assert finder.losses[-1] > 4 * min(finder.losses)


def test_range_test_reports_even_when_the_run_diverges(make_trainer: Any, tmp_path: Path) -> None:
    finder = LRFinder(min_lr=1e30, max_lr=1e300, updates=40, stop_factor=math.inf)
    trainer = make_trainer({"finder": finder}, tmp_path, max_epochs=50, log_every_n_steps=1)
    with pytest.raises(DivergedError):
        trainer.fit()
    assert json.loads((tmp_path / "lr_finder.json").read_text())["loss"]


def test_suggestion_is_the_steepest_descent() -> None:
    finder = LRFinder(smoothing=0.0)
    finder.rates, finder.losses = [1, 2, 3, 4, 5], [5.0, 4.5, 2.0, 1.9, 9.0]
    assert finder.suggestion() == 2
    finder.losses = [1.0, 2.0, 3.0, 4.0, 5.0]
    assert finder.suggestion() is None


def test_smoothed_is_corrected_for_its_start() -> None:
    assert smoothed([2.0, 2.0, 2.0], 0.9) == pytest.approx([2.0, 2.0, 2.0])
    assert smoothed([1.0, 3.0], 0.5) == pytest.approx([1.0, (0.25 * 1 + 0.5 * 3) / 0.75])


def test_range_test_needs_every_loss(make_trainer: Any) -> None:
    with pytest.raises(CallbackError, match=r"trainer\.log_every_n_steps=1"):
        make_trainer({"finder": LRFinder()}).fit()
    with pytest.raises(CallbackError):
        LRFinder(min_lr=1.0, max_lr=0.1)
    with pytest.raises(CallbackError):
        LRFinder(updates=1)


def diverging() -> list[Any]:
    batches = [(torch.ones(6, 4).double(), torch.ones(6, 2).double()) for _ in range(5)]
    batches[3][0][2, 1] = math.nan
    return batches


def test_a_diverged_run_leaves_a_report(make_trainer: Any, tmp_path: Path) -> None:
    trainer = make_trainer({"dump": StateDump()}, tmp_path, batches=diverging())
    with pytest.raises(DivergedError) as raised:
        trainer.fit()
    lines = (tmp_path / "divergence.txt").read_text().splitlines()
    assert lines[0] == str(raised.value)
    table = {line.split(maxsplit=3)[3]: line.split()[2] for line in lines[5:]}
    assert table["0.weight"] == "0"  # the update was not applied
    assert int(table["0.weight (gradient)"]) > 0
    tensors = torch.load(tmp_path / "divergence.pt", weights_only=True)
    assert torch.equal(tensors["model"]["0.weight"], trainer.model[0].weight)
    assert tensors["gradients"]["0.weight"].isnan().any()
    assert tensors["state"]["global_step"] == 3


def test_only_a_divergence_is_dumped(make_trainer: Any, tmp_path: Path) -> None:
    class Breaks(Callback):
        def on_epoch_end(self, trainer: Any) -> None:
            raise ValueError("broken")

    with pytest.raises(ValueError, match="broken"):
        make_trainer({"dump": StateDump(), "breaks": Breaks()}, tmp_path).fit()
    assert not any(tmp_path.iterdir())


def test_a_dump_that_fails_hides_nothing(make_trainer: Any, tmp_path: Path, caplog: Any) -> None:
    trainer = make_trainer({"dump": StateDump()}, batches=diverging())
    trainer.run_dir = tmp_path / "missing"
    with pytest.raises(DivergedError):
        trainer.fit()
    assert "cannot write" in caplog.text


def test_histograms(make_trainer: Any, tmp_path: Path) -> None:
    callbacks = {"histograms": Histograms(bins=8), "tensorboard": TensorBoard()}
    trainer = make_trainer(callbacks, tmp_path)
    trainer.fit()
    board = EventAccumulator(str(tmp_path / "tensorboard"), size_guidance={"histograms": 0})
    board.Reload()
    assert set(board.Tags()["histograms"]) == {
        f"{kind}/{name}"
        for kind in ("weights", "gradients")
        for name, _ in trainer.model.named_parameters()
    }
    points = board.Histograms("weights/0.weight")
    assert [point.step for point in points] == [5, 10]
    weight = trainer.model[0].weight.detach()
    assert points[-1].histogram_value.num == weight.numel()
    assert points[-1].histogram_value.sum == pytest.approx(weight.sum().item())
    assert points[-1].histogram_value.max == pytest.approx(weight.max().item())


def test_histogram_of_values_that_are_not_finite() -> None:
    histogram = histogram_of(torch.tensor([1.0, math.nan, 3.0, math.inf]), bins=2)
    assert (histogram.counts.tolist(), histogram.total, histogram.squares) == ([1, 1], 4.0, 10.0)
    assert histogram_of(torch.tensor([math.nan]), bins=2).counts.tolist() == [0, 0]
