"""The HParams tab of a sweep, as TensorBoard's own plugin reads it from the jobs' event files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from tensorboard.backend.event_processing.data_provider import MultiplexerDataProvider
from tensorboard.backend.event_processing.plugin_event_multiplexer import EventMultiplexer
from tensorboard.context import RequestContext
from tensorboard.plugins.base_plugin import TBContext
from tensorboard.plugins.hparams import api_pb2
from tensorboard.plugins.hparams.backend_context import Context
from tensorboard.plugins.hparams.get_experiment import Handler as GetExperiment
from tensorboard.plugins.hparams.list_session_groups import Handler as ListSessionGroups

from callbacks.checkpoint import Checkpoint
from callbacks.tensorboard import TensorBoard
from scripts.sweeps import dashboard
from scripts.sweeps.process import Outcome
from trainer.callback import Results

GLOBS = ["seed", "loader.batch_size", "optimizer.*"]
STATES = ("finished", "pruned", "preempted", "failed", "killed", "failed early", "not started")


def tab(board: Path) -> tuple[Any, dict[str, Any]]:
    """Return what TensorBoard answers for the tab: columns, and each run's session."""
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


@pytest.fixture
def sweep(make_trainer: Any, tmp_path: Path) -> Path:
    """A sweep over weight_decay with a job that ended in each way there is."""
    varied = ["optimizer.weight_decay"]
    dashboard.begin(tmp_path, varied)
    jobs = []
    for number, state in enumerate(STATES):
        folder, overrides = tmp_path / str(number), {varied[0]: str(number)}
        jobs.append(Outcome(number, folder, overrides, state=state.removesuffix(" early")))
        if state in ("failed early", "not started"):
            continue
        folder.mkdir()
        optimizer = {"lr": 0.05, "weight_decay": number}
        config = {"seed": 3, "optimizer": optimizer, "loader": {"batch_size": 8}}
        (folder / "config.yaml").write_text(yaml.safe_dump(config))
        (folder / "overrides.yaml").write_text(json.dumps([f"{varied[0]}={number}"]))
        callbacks = {
            "tensorboard": TensorBoard(GLOBS),
            "checkpoint": Checkpoint(monitor="val/loss"),
        }
        trainer = make_trainer(callbacks, folder)
        trainer.fit()
        if state == "finished":
            trainer.log({"test/loss": 0.25})
        if state != "killed":
            trainer.end(Results(state))
    dashboard.arrange(tmp_path, jobs, varied)
    return tmp_path


def test_each_job_has_a_row_with_its_values_and_how_it_ended(sweep: Path) -> None:
    experiment, rows = tab(sweep / "tensorboard")
    columns = [info.name for info in experiment.hparam_infos]
    assert columns == ["optimizer.weight_decay", "seed", "loader.batch_size", "optimizer.lr"]
    metrics = [info.name.tag for info in experiment.metric_infos]
    assert metrics == ["best/val/loss", "test/loss", "test/accuracy"]

    names = {state: f"weight_decay={n}" for n, state in enumerate(STATES)}
    statuses = {state: rows[name][1].status for state, name in names.items() if name in rows}
    done, failed = api_pb2.STATUS_SUCCESS, api_pb2.STATUS_FAILURE
    assert statuses == {
        "finished": done,
        "pruned": done,
        "preempted": api_pb2.STATUS_UNKNOWN,
        "failed": failed,
        "killed": failed,
        "failed early": failed,
    }
    for number, name in enumerate(names.values()):
        if name in rows:
            group, _ = rows[name]
            assert group.hparams["optimizer.weight_decay"].number_value == number
    group, _ = rows["weight_decay=0"]
    values = {value.name.tag: value.value for value in group.metric_values}
    assert values["test/loss"] == 0.25
    best = (sweep / "0" / "checkpoints" / "index.json").read_text()
    assert str(values["best/val/loss"])[:8] in best
