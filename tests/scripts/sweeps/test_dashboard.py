"""A sweep in TensorBoard: each job under its varied values, with a row in any case."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import yaml
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.hparams import api_pb2, metadata

from callbacks.support.event_file import EventFile, rewind
from callbacks.support.hparams import columns, read_hparams, session_start
from callbacks.support.settings import swept_keys
from scripts.sweeps import dashboard
from scripts.sweeps.process import Outcome
from trainer.runs.dashboard import command, sweep_command

VARIED = ["optimizer.lr", "seed"]


def job(sweep: Path, number: int, lr: str, seed: str, state: str = "finished") -> Outcome:
    values = {"model": "mlp", "optimizer.lr": lr, "seed": seed}
    return Outcome(number, sweep / str(number), values, state=state)


def ran(outcome: Outcome) -> Outcome:
    folder = outcome.run_dir / "tensorboard"
    EventFile(folder, 0).summary(0, session_start({"optimizer.lr": 0.1}))
    return outcome


def session(folder: Path) -> tuple[dict[str, Any], int | None]:
    """Return the settings of a run's row, and how it ended."""
    board = EventAccumulator(str(folder))
    board.Reload()
    start, end = metadata.SESSION_START_INFO_TAG, metadata.SESSION_END_INFO_TAG
    tags = board.Tags()["tensors"]
    info = board.SummaryMetadata(start).plugin_data.content
    values = metadata.parse_session_start_info_plugin_data(info).hparams
    found = {key: getattr(value, value.WhichOneof("kind")) for key, value in values.items()}
    if end not in tags:
        return found, None
    content = board.SummaryMetadata(end).plugin_data.content
    return found, metadata.parse_session_end_info_plugin_data(content).status


def test_jobs_are_named_after_their_varied_values(tmp_path: Path) -> None:
    jobs = [job(tmp_path, 0, "0.1", "1"), job(tmp_path, 1, "0.1", "2")]
    assert dashboard.job_names(jobs, VARIED) == {0: "lr=0.1,seed=1", 1: "lr=0.1,seed=2"}
    assert dashboard.job_names(jobs, ["optimizer.lr"]) == {0: "lr=0.1,job=0", 1: "lr=0.1,job=1"}
    assert dashboard.job_names(jobs[:1], []) == {0: "job 0"}
    odd = job(tmp_path, 2, "../../a\nb", "x" * 300)
    (name,) = dashboard.job_names([odd], VARIED).values()
    assert name.startswith("lr=.._.._a_b,seed=xxx")
    assert len(name) == 150


def test_links_are_relative_and_follow_the_grid(tmp_path: Path) -> None:
    sweep = tmp_path / "sweep"
    jobs = [ran(job(sweep, 0, "0.1", "1")), ran(job(sweep, 3, "0.2", "1"))]
    dashboard.arrange(sweep, jobs, VARIED)
    moved = tmp_path / "moved"
    sweep.rename(moved)  # a sweep may be copied elsewhere
    links = {path.name: os.readlink(path) for path in (moved / "tensorboard").iterdir()}
    assert links == {"lr=0.1,seed=1": "../0/tensorboard", "lr=0.2,seed=1": "../3/tensorboard"}
    assert session(moved / "tensorboard" / "lr=0.1,seed=1")[0] == {"optimizer.lr": 0.1}

    (moved / "tensorboard" / "mine").mkdir()
    (moved / "tensorboard" / "mine" / "notes.txt").write_text("not a row of ours")
    other = [job(moved, 0, "0.1", "1"), ran(job(moved, 4, "0.3", "1"))]
    dashboard.arrange(moved, other, VARIED)  # the grid has changed
    found = {path.name for path in (moved / "tensorboard").iterdir()}
    assert found == {"lr=0.1,seed=1", "lr=0.3,seed=1", "mine"}


def test_a_job_that_never_began_to_train_has_a_row(tmp_path: Path) -> None:
    failed = job(tmp_path, 0, "0.1", "1", state="failed")
    waiting = job(tmp_path, 1, "0.2", "1", state="not started")
    for _ in range(2):
        dashboard.arrange(tmp_path, [failed, waiting], VARIED)
    place = tmp_path / "tensorboard" / "lr=0.1,seed=1"
    assert [path.name for path in (tmp_path / "tensorboard").iterdir()] == [place.name]
    assert len(list(place.iterdir())) == 1
    assert session(place) == ({"optimizer.lr": 0.1, "seed": 1.0}, api_pb2.STATUS_FAILURE)

    ran(failed).state = "finished"  # it was resumed
    dashboard.arrange(tmp_path, [failed, waiting], VARIED)
    assert place.is_symlink()
    assert session(place) == ({"optimizer.lr": 0.1}, None)


def test_a_killed_job_has_failed_until_it_is_resumed(tmp_path: Path) -> None:
    killed = ran(job(tmp_path, 0, "0.1", "1", state="killed"))
    own = killed.run_dir / "tensorboard"
    (first,) = own.iterdir()
    size = first.stat().st_size
    for _ in range(2):
        dashboard.arrange(tmp_path, [killed], VARIED)
    assert len(list(own.iterdir())) == 2
    assert session(own)[1] == api_pb2.STATUS_FAILURE
    rewind(own, {first.name: size})  # what a resume does
    assert session(own)[1] is None


def test_a_dashboard_that_cannot_be_written_does_not_end_the_sweep(tmp_path: Path) -> None:
    (tmp_path / "tensorboard").write_text("in the way")
    dashboard.arrange(tmp_path, [ran(job(tmp_path, 0, "0.1", "1"))], VARIED)
    dashboard.link_started(tmp_path, [], job(tmp_path, 0, "0.1", "1"), VARIED)


def test_a_jobs_columns_begin_with_what_is_swept(tmp_path: Path) -> None:
    dashboard.begin(tmp_path, ["model", "optimizer.lr"])
    run = tmp_path / "0"
    run.mkdir()
    config = {"seed": 1, "optimizer": {"lr": 0.1, "betas": [0.9]}, "model": {"_target_": "m.MLP"}}
    (run / "config.yaml").write_text(yaml.safe_dump(config))
    (run / "overrides.yaml").write_text(json.dumps(["model=mlp", "optimizer.lr=0.1"]))
    swept = swept_keys(run)
    found = read_hparams(run, ["seed", "optimizer.*"], swept)
    assert found == {"model": "mlp", "optimizer.lr": 0.1, "seed": 1, "optimizer.betas": "[0.9]"}
    (value,) = columns(found, swept, ["best/val/loss", "test/loss"]).value
    experiment = metadata.parse_experiment_plugin_data(value.metadata.plugin_data.content)
    assert [info.name for info in experiment.hparam_infos if info.differs] == [*swept, "seed"]
    assert [info.name.tag for info in experiment.metric_infos] == ["best/val/loss", "test/loss"]
    assert swept_keys(tmp_path) == []  # a run that is no job


def test_a_job_and_its_sweep_print_one_command(tmp_path: Path) -> None:
    dashboard.begin(tmp_path, VARIED)
    assert command(tmp_path / "0") == sweep_command(tmp_path)
    assert sweep_command(tmp_path) == f"regimen tensorboard --logdir {tmp_path}"


@pytest.mark.parametrize("content", ["", "[]", '{"swept": 3}'])
def test_a_damaged_sweep_file_is_no_error(tmp_path: Path, content: str) -> None:
    (tmp_path / "sweep.json").write_text(content)
    assert swept_keys(tmp_path / "0") == []
