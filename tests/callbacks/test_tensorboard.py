import errno
import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.directory_watcher import DirectoryWatcher
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.backend.event_processing.event_file_loader import EventFileLoader
from tensorboard.backend.event_processing.io_wrapper import IsTensorFlowEventsFile
from tensorboard.plugins.hparams import api_pb2, metadata

from callbacks.tensorboard import TensorBoard
from trainer.callback import Results
from trainer.runs.dashboard import command

Series = dict[str, list[tuple[int, float]]]


def series(folder: Path) -> Series:
    board = EventAccumulator(str(folder / "tensorboard"), size_guidance={"scalars": 0})
    board.Reload()
    tags = board.Tags()["scalars"]
    return {tag: [(event.step, event.value) for event in board.Scalars(tag)] for tag in tags}


def events(folder: Path) -> Iterator[Any]:
    return DirectoryWatcher(
        str(folder / "tensorboard"), EventFileLoader, IsTensorFlowEventsFile
    ).Load()


class Recorder(TensorBoard):
    """A TensorBoard callback that also remembers what it was given."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: Series = {}

    def on_log(self, trainer: Any, scalars: Any) -> None:
        super().on_log(trainer, scalars)
        for key, value in scalars.items():
            self.seen.setdefault(key, []).append((trainer.state.global_step, value))


def test_scalars_on_the_axis_of_applied_updates(make_trainer: Any, tmp_path: Path) -> None:
    recorder = Recorder()
    trainer = make_trainer({"tensorboard": recorder}, tmp_path)
    trainer.fit()
    trainer.log({"test/loss": 0.25})  # after the training, and its teardown
    found = series(tmp_path)
    assert found.keys() == recorder.seen.keys()
    assert [step for step, _ in found["train/loss"]] == [2, 4, 5, 6, 8, 10]
    assert found["test/loss"] == [(10, 0.25)]
    for tag, points in recorder.seen.items():
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
    logs = [
        event.session_log for event in events(tmp_path / "cut") if event.HasField("session_log")
    ]
    assert [log.status for log in logs] == [logs[0].START]


def test_a_watching_tensorboard_is_told_what_to_forget(
    make_trainer: Any, tmp_path: Path, stop_at: Any, carry_over: Any
) -> None:
    first = make_trainer({"tensorboard": TensorBoard(), "stop": stop_at(3)}, tmp_path)
    second = make_trainer({"tensorboard": TensorBoard()}, tmp_path)
    first.fit()
    carry_over(first, second)
    second.fit()
    purges = [event.step for event in events(tmp_path) if event.HasField("session_log")]
    assert purges == [4]


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
    warnings = [record.getMessage() for record in caplog.records]
    assert len(warnings) == 1
    assert warnings[0].startswith("cannot write")
    assert warnings[0].endswith("no space left; training continues without it")
    found = series(tmp_path)  # records 4, 5 and 6 are missing, the later ones are whole
    assert [step for step, _ in found["train/loss"]] == [2, 6, 8, 10]


def test_a_folder_that_cannot_be_made_is_one_warning(
    make_trainer: Any, tmp_path: Path, caplog: Any
) -> None:
    (tmp_path / "tensorboard").write_text("in the way")
    with caplog.at_level(logging.WARNING):
        make_trainer({"tensorboard": TensorBoard()}, tmp_path).fit()
    assert len(caplog.records) == 1


def test_a_deleted_folder_is_one_warning(make_trainer: Any, tmp_path: Path, caplog: Any) -> None:
    trainer = make_trainer({"tensorboard": TensorBoard()}, tmp_path)
    trainer.fit()
    for path in (tmp_path / "tensorboard").iterdir():
        path.unlink()
    (tmp_path / "tensorboard").rmdir()
    with caplog.at_level(logging.WARNING):
        trainer.log({"test/loss": 1.0})
        trainer.log({"test/loss": 1.0})
    assert len(caplog.records) == 1


def test_hparams_are_in_the_runs_own_files(make_trainer: Any, tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(
        "seed: 3\nrun_dir: null\noptimizer: {lr: 1.0e-06, nesterov: true, betas: [0.9, 0.99]}\n"
        "loader: {batch_size: 8, num_workers: 2}\nmodel: {_target_: models.mlp.MLP}\n"
    )
    patterns = ["seed", "run_dir", "optimizer.*", "loader.batch_size", "model._target_"]
    make_trainer({"tensorboard": TensorBoard(patterns)}, tmp_path).fit()
    assert [path.is_file() for path in (tmp_path / "tensorboard").iterdir()] == [True]
    contents = {
        value.tag: metadata.parse_session_start_info_plugin_data(value.metadata.plugin_data.content)
        for event in events(tmp_path)
        for value in event.summary.value
        if value.tag == metadata.SESSION_START_INFO_TAG
    }
    start = contents[metadata.SESSION_START_INFO_TAG].hparams
    assert {key: getattr(value, value.WhichOneof("kind")) for key, value in start.items()} == {
        "seed": 3.0,
        "optimizer.lr": 1e-6,
        "optimizer.nesterov": True,
        "optimizer.betas": "[0.9, 0.99]",
        "loader.batch_size": 8.0,
        "model._target_": "models.mlp.MLP",
    }


@pytest.mark.parametrize(
    ("state", "statuses"),
    [
        pytest.param("finished", [api_pb2.STATUS_SUCCESS], id="finished"),
        pytest.param("failed", [api_pb2.STATUS_FAILURE], id="failed"),
        pytest.param("preempted", [], id="a signal: open, as it may go on"),
        pytest.param("stopped", [], id="its time limit: open"),
    ],
)
def test_hparams_session_is_closed_as_it_ended(
    make_trainer: Any, tmp_path: Path, state: str, statuses: list[int]
) -> None:
    trainer = make_trainer({"tensorboard": TensorBoard()}, tmp_path)
    trainer.fit()
    trainer.end(Results(state))
    ends = [
        metadata.parse_session_end_info_plugin_data(value.metadata.plugin_data.content).status
        for event in events(tmp_path)
        for value in event.summary.value
        if value.tag == metadata.SESSION_END_INFO_TAG
    ]
    assert ends == statuses


def test_command_is_safe_to_paste() -> None:
    plain, odd = command(Path("runs/net/1")), command(Path("/my runs/net:1"))
    assert plain == "regimen tensorboard --logdir runs/net/1"
    assert odd == "regimen tensorboard --logdir '/my runs/net:1'"
