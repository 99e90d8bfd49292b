"""TensorBoard's files, as TensorBoard itself reads them."""

import errno
import io
import json
import logging
import os
import random
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from PIL import Image
from tensorboard.backend.event_processing.data_provider import MultiplexerDataProvider
from tensorboard.backend.event_processing.directory_watcher import DirectoryWatcher
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.backend.event_processing.event_file_loader import EventFileLoader
from tensorboard.backend.event_processing.io_wrapper import IsTensorFlowEventsFile
from tensorboard.backend.event_processing.plugin_event_multiplexer import EventMultiplexer
from tensorboard.context import RequestContext
from tensorboard.plugins.base_plugin import TBContext
from tensorboard.plugins.hparams import api_pb2, metadata
from tensorboard.plugins.hparams.backend_context import Context
from tensorboard.plugins.hparams.get_experiment import Handler as GetExperiment
from tensorboard.plugins.hparams.list_session_groups import Handler as ListSessionGroups
from tensorboard.summary.writer.record_writer import RecordWriter
from tensorboard.util import tensor_util

from callbacks.checkpoint import Checkpoint
from callbacks.tensorboard import TensorBoard, _record
from callbacks.trackers.recorder import leaves
from scripts.composition.compose import compose
from scripts.sweeps.leaderboard import Job
from scripts.sweeps.sweep import link_jobs
from trainer.callback import Results
from trainer.media import PRCurve
from trainer.runs.status import command

Series = dict[str, list[tuple[int, float]]]
SWEPT = "optimizer.weight_decay"
STATES = ("finished", "pruned", "preempted", "stopped", "killed", "failed")


def series(folder: Path) -> Series:
    board = EventAccumulator(str(folder / "tensorboard"), size_guidance={"scalars": 0})
    board.Reload()
    tags = board.Tags()["scalars"]
    return {tag: [(event.step, event.value) for event in board.Scalars(tag)] for tag in tags}


def events(folder: Path) -> Iterator[Any]:
    place = str(folder / "tensorboard")
    return DirectoryWatcher(place, EventFileLoader, IsTensorFlowEventsFile).Load()


class Noting(TensorBoard):
    """A TensorBoard callback that also remembers what it was given."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: Series = {}

    def on_log(self, trainer: Any, scalars: Any) -> None:
        super().on_log(trainer, scalars)
        for key, value in scalars.items():
            self.seen.setdefault(key, []).append((trainer.state.global_step, value))


def test_scalars_on_the_axis_of_applied_updates(make_trainer: Any, tmp_path: Path) -> None:
    noting = Noting()
    trainer = make_trainer({"tensorboard": noting}, tmp_path)
    trainer.fit()
    trainer.log({"test/loss": 0.25})  # after the training, and its teardown
    found = series(tmp_path)
    assert found.keys() == noting.seen.keys()
    assert [step for step, _ in found["train/loss"]] == [2, 4, 5, 6, 8, 10]
    assert found["test/loss"] == [(10, 0.25)]
    for tag, points in noting.seen.items():
        assert found[tag] == [(step, pytest.approx(value, rel=1e-6)) for step, value in points]


@pytest.mark.parametrize("cut", [3, 5, 6])
def test_a_resumed_run_leaves_the_series_of_one_never_interrupted(
    make_trainer: Any, tmp_path: Path, stop_at: Any, carry_over: Any, cut: int
) -> None:
    make_trainer({"tensorboard": TensorBoard()}, tmp_path / "whole").fit()
    first = make_trainer({"tensorboard": TensorBoard(), "stop": stop_at(cut)}, tmp_path / "cut")
    second = make_trainer({"tensorboard": TensorBoard()}, tmp_path / "cut")
    third = make_trainer({"tensorboard": TensorBoard()}, tmp_path / "cut")
    first.fit()
    carry_over(first, second)
    carry_over(first, third)
    second.callbacks["tensorboard"].on_fit_start(second)
    second.log({"train/loss": 9.0})  # lost: it goes on from the first one's checkpoint again
    first.log({"test/loss": 9.0})  # lost as well
    third.fit()
    assert series(tmp_path / "cut") == series(tmp_path / "whole")
    # A TensorBoard that is open is told what to forget.
    purges = [event.step for event in events(tmp_path / "cut") if event.HasField("session_log")]
    assert purges == [cut + 1]
    for run in ("cut", "whole"):  # the layout of the charts once, however often it is resumed
        tags = [value.tag for event in events(tmp_path / run) for value in event.summary.value]
        assert tags.count("custom_scalars__config__") == 1


@pytest.mark.parametrize("length", [0, 1, 9, 5000])
def test_a_record_is_that_of_tensorboards_own_writer(length: int) -> None:
    content = random.Random(length).randbytes(length)
    expected = io.BytesIO()
    RecordWriter(expected).write(content)
    assert _record(content) == expected.getvalue()


def test_a_full_disk_is_one_warning_and_leaves_no_half_record(
    make_trainer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    write, calls = os.write, []

    def full(descriptor: int, content: bytes) -> int:
        if not os.readlink(f"/proc/self/fd/{descriptor}").endswith(".regimen"):
            return write(descriptor, content)
        calls.append(len(content))
        if len(calls) in (4, 6):
            return write(descriptor, content[:7])
        if len(calls) == 5:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(descriptor, content)

    monkeypatch.setattr(os, "write", full)
    with caplog.at_level(logging.WARNING):
        make_trainer({"tensorboard": TensorBoard()}, tmp_path).fit()
    (warning,) = (record.getMessage() for record in caplog.records)
    assert warning.startswith("callbacks.tensorboard: cannot write")
    assert warning.endswith("no space left; training continues without it")
    found = series(tmp_path)  # records 4, 5 and 6 are missing, the later ones are whole
    assert [step for step, _ in found["train/loss"]] == [2, 6, 8, 10]


@pytest.mark.parametrize("when", ["at the start", "later"])
def test_a_folder_that_is_not_there_is_one_warning_and_is_not_begun_anew(
    make_trainer: Any, tmp_path: Path, caplog: Any, when: str
) -> None:
    trainer, folder = (
        make_trainer({"tensorboard": TensorBoard()}, tmp_path),
        tmp_path / "tensorboard",
    )
    if when == "at the start":
        folder.write_text("in the way")
    with caplog.at_level(logging.WARNING):
        trainer.fit()
        if when == "later":
            for path in folder.iterdir():
                path.unlink()
        trainer.log({"test/loss": 1.0})
        trainer.log({"test/loss": 1.0})
    assert len(caplog.records) == 1
    assert folder.is_file() or not list(folder.iterdir())


CURVE = PRCurve(
    thresholds=np.array([0.0, 0.5, 1.0]),
    true_positives=np.array([4.0, 3.0, 0.0]),
    false_positives=np.array([6.0, 1.0, 0.0]),
    true_negatives=np.array([0.0, 5.0, 6.0]),
    false_negatives=np.array([0.0, 1.0, 4.0]),
)


def test_images_histograms_texts_and_curves(make_trainer: Any, tmp_path: Path) -> None:
    trainer = make_trainer({"tensorboard": TensorBoard()}, tmp_path)
    trainer.fit()
    trainer.log_image("an/image", torch.tensor([[0.0, 0.5], [1.0, 0.25]]))
    trainer.log_histogram("a/histogram", torch.arange(8.0), bins=4)
    trainer.log_text("a/text", "**bold**")
    trainer.log_pr_curve("a/curve", CURVE)
    board = EventAccumulator(str(tmp_path / "tensorboard"))
    board.Reload()
    (image,) = board.Images("an/image")
    stored = np.asarray(Image.open(io.BytesIO(image.encoded_image_string)))
    assert (image.step, stored[..., 0].tolist()) == (10, [[0, 128], [255, 64]])
    histogram = board.Histograms("a/histogram")[0].histogram_value
    assert (histogram.num, histogram.sum, histogram.sum_squares) == (8, 28.0, 140.0)
    assert (histogram.min, histogram.max, histogram.bucket) == (0, 7, [2, 2, 2, 2])
    (text,) = board.Tensors("a/text")
    assert tensor_util.make_ndarray(text.tensor_proto).item() == b"**bold**"
    (curve,) = board.Tensors("a/curve")
    rows = tensor_util.make_ndarray(curve.tensor_proto)
    assert np.allclose(rows[:2], CURVE[1:3])
    assert np.allclose(rows[4:], [[0.4, 0.75, 1.0], [1.0, 0.75, 0.0]])


def test_hparams_are_in_the_runs_own_files(make_trainer: Any, tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(
        "seed: 3\nrun_dir: null\noptimizer: {lr: 1.0e-06, nesterov: true, betas: [0.9, 0.99]}\n"
        "loader: {batch_size: 8, num_workers: 2}\nmodel: {_target_: models.mlp.MLP}\n"
    )
    patterns = ["seed", "run_dir", "optimizer.*", "loader.batch_size", "model._target_"]
    make_trainer({"tensorboard": TensorBoard(patterns)}, tmp_path).fit()
    assert [path.is_file() for path in (tmp_path / "tensorboard").iterdir()] == [True]
    (start,) = (
        metadata.parse_session_start_info_plugin_data(value.metadata.plugin_data.content).hparams
        for event in events(tmp_path)
        for value in event.summary.value
        if value.tag == metadata.SESSION_START_INFO_TAG
    )
    assert {key: getattr(value, value.WhichOneof("kind")) for key, value in start.items()} == {
        "seed": 3.0,
        "optimizer.lr": 1e-6,
        "optimizer.nesterov": True,
        "optimizer.betas": "[0.9, 0.99]",
        "loader.batch_size": 8.0,
        "model._target_": "models.mlp.MLP",
    }


def test_a_run_by_itself_shows_rate_batch_size_model_and_seed() -> None:
    config = compose(["experiment=resnet18", "optimizer=muon"]).config
    patterns = config["callbacks"]["tensorboard"]["hparams"]
    shown = [key for key, _ in leaves(config) if any(fnmatch(key, p) for p in patterns)]
    assert sorted(shown) == ["loader.batch_size", "model._target_", "optimizer.lr", "seed"]


def tab(board: Path) -> tuple[Any, dict[str, Any]]:
    """Return what TensorBoard answers for the HParams tab: columns, and each run's session."""
    multiplexer = EventMultiplexer()
    multiplexer.AddRunsFromDirectory(str(board))
    multiplexer.Reload()
    provider = MultiplexerDataProvider(multiplexer, str(board))
    asked = RequestContext(), Context(TBContext(data_provider=provider)), ""
    experiment = GetExperiment(*asked, api_pb2.GetExperimentRequest()).run()
    statuses = [api_pb2.Status.Value(name) for name in api_pb2.Status.keys()]  # noqa: SIM118
    metrics = [api_pb2.ColParams(metric=info.name) for info in experiment.metric_infos]
    request = api_pb2.ListSessionGroupsRequest(
        allowed_statuses=statuses, col_params=metrics, slice_size=100
    )
    groups = ListSessionGroups(*asked, request).run().session_groups
    return experiment, {s.name: (group, s) for group in groups for s in group.sessions}


def test_each_job_of_a_sweep_has_a_row_with_what_varies_and_how_it_ended(
    make_trainer: Any, tmp_path: Path
) -> None:
    (tmp_path / "sweep.json").write_text(json.dumps({"swept": [SWEPT]}))
    jobs = []
    for number, state in enumerate(STATES):
        folder = tmp_path / str(number)
        jobs.append(Job(number, folder, {SWEPT: str(number)}, state=state))
        folder.mkdir()
        config = {"seed": 3, "optimizer": {"lr": 0.05, "weight_decay": number}}
        (folder / "config.yaml").write_text(yaml.safe_dump(config))
        (folder / "overrides.yaml").write_text(json.dumps([f"{SWEPT}={number}"]))
        trainer = make_trainer(
            {
                "tensorboard": TensorBoard(["seed", "optimizer.*"]),
                "checkpoint": Checkpoint(monitor="val/loss"),
            },
            folder,
        )
        trainer.fit()
        trainer.log({"test/loss": 0.25})
        if state != "killed":
            trainer.end(Results(state))
    link_jobs(tmp_path, jobs, [SWEPT])

    experiment, rows = tab(tmp_path / "tensorboard")
    assert [info.name for info in experiment.hparam_infos] == [SWEPT]  # the first five are ticked
    metrics = [info.name.tag for info in experiment.metric_infos]
    assert metrics == ["best/val/loss", "test/loss", "test/accuracy"]
    statuses = [rows[f"weight_decay={number}"][1].status for number in range(len(STATES))]
    done, unknown = api_pb2.STATUS_SUCCESS, api_pb2.STATUS_UNKNOWN
    assert statuses == [done, done, unknown, unknown, unknown, api_pb2.STATUS_FAILURE]
    group, _ = rows["weight_decay=0"]
    assert group.hparams[SWEPT].number_value == 0
    values = {value.name.tag: value.value for value in group.metric_values}
    assert values["test/loss"] == 0.25
    best = (tmp_path / "0" / "checkpoints" / "index.json").read_text()
    assert str(values["best/val/loss"])[:8] in best


def test_command_is_safe_to_paste() -> None:
    plain, odd = command(Path("runs/net/1")), command(Path("/my runs/net:1"))
    assert plain == "tensorboard --logdir runs/net/1/tensorboard"
    assert odd == "tensorboard --logdir '/my runs/net:1/tensorboard'"
