"""TensorBoard's files, as TensorBoard itself reads them."""

import json
from fnmatch import fnmatch
from pathlib import Path

import yaml
from tensorboard.backend.event_processing.data_provider import MultiplexerDataProvider
from tensorboard.backend.event_processing.plugin_event_multiplexer import EventMultiplexer
from tensorboard.context import RequestContext
from tensorboard.plugins.base_plugin import TBContext
from tensorboard.plugins.hparams import api_pb2, metadata
from tensorboard.plugins.hparams.backend_context import Context
from tensorboard.plugins.hparams.get_experiment import Handler as GetExperiment
from tensorboard.plugins.hparams.list_session_groups import Handler as ListSessionGroups

from regimen.callbacks.checkpoint import Checkpoint
from regimen.callbacks.tensorboard import TensorBoard
from regimen.callbacks.trackers.recorder import leaves
from regimen.scripts.composition.compose import compose
from regimen.scripts.sweeps.leaderboard import Job, link_jobs
from regimen.trainer.callback import Results
from regimen.trainer.runs.status import command

SWEPT = "optimizer.weight_decay"
STATES = ("finished", "pruned", "preempted", "stopped", "killed", "failed")


def test_hparams_are_in_the_runs_own_files(make_trainer, tmp_path, events):
    (tmp_path / "config.yaml").write_text(
        "seed: 3\nrun_dir: null\noptimizer: {lr: 1.0e-06, nesterov: true, betas: [0.9, 0.99]}\n"
        "loader: {batch_size: 8, num_workers: 2}\nmodel: {_target_: regimen.models.mlp.MLP}\n"
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
        "model._target_": "regimen.models.mlp.MLP",
    }


def test_a_run_by_itself_shows_rate_batch_size_model_and_seed():
    config = compose(["experiment=resnet18", "optimizer=muon"]).config
    patterns = config["callbacks"]["tensorboard"]["hparams"]
    shown = [key for key, _ in leaves(config) if any(fnmatch(key, p) for p in patterns)]
    assert sorted(shown) == ["loader.batch_size", "model._target_", "optimizer.lr", "seed"]


def tab(board):
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


def test_each_job_of_a_sweep_has_a_row_with_what_varies_and_how_it_ended(make_trainer, tmp_path):
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
    assert statuses == [done, done, unknown, unknown, unknown, unknown]
    group, _ = rows["weight_decay=0"]
    assert group.hparams[SWEPT].number_value == 0
    values = {value.name.tag: value.value for value in group.metric_values}
    assert values["test/loss"] == 0.25
    best = (tmp_path / "0" / "checkpoints" / "index.json").read_text()
    assert str(values["best/val/loss"])[:8] in best


def test_command_is_safe_to_paste():
    plain, odd = command(Path("runs/net/1")), command(Path("/my runs/net:1"))
    assert plain == "tensorboard --logdir runs/net/1/tensorboard"
    assert odd == "tensorboard --logdir '/my runs/net:1/tensorboard'"
