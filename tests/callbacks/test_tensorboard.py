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


def hparams_of(events):
    """Return the hyper-parameters of the one session that a run's events begin."""
    found = []
    for event in events:
        for value in event.summary.value:
            if value.tag == metadata.SESSION_START_INFO_TAG:
                content = value.metadata.plugin_data.content
                found.append(metadata.parse_session_start_info_plugin_data(content))
    (start,) = found
    return {name: getattr(v, v.WhichOneof("kind")) for name, v in start.hparams.items()}


CONFIG = """
seed: 3
run_dir: null
optimizer: {lr: 1.0e-06, nesterov: true, betas: [0.9, 0.99]}
loader: {batch_size: 8, num_workers: 2}
model: {_target_: regimen.models.mlp.MLP}
"""


def test_hparams_are_in_the_runs_own_files(make_trainer, tmp_path, events):
    (tmp_path / "config.yaml").write_text(CONFIG)
    patterns = ["seed", "run_dir", "optimizer.*", "loader.batch_size", "model._target_"]
    make_trainer({"tensorboard": TensorBoard(patterns)}, tmp_path).fit()

    (file,) = (tmp_path / "tensorboard").iterdir()

    assert file.is_file()
    assert hparams_of(events(tmp_path)) == {
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
    rows = {}
    for group in ListSessionGroups(*asked, request).run().session_groups:
        for session in group.sessions:
            rows[session.name] = (group, session)
    return experiment, rows


def run_job(make_trainer, folder, number, state):
    """Train a job of a sweep, and let it end; a killed one does not say so."""
    folder.mkdir()
    config = {"seed": 3, "optimizer": {"lr": 0.05, "weight_decay": number}}
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    (folder / "overrides.yaml").write_text(json.dumps([f"{SWEPT}={number}"]))
    callbacks = {
        "tensorboard": TensorBoard(["seed", "optimizer.*"]),
        "checkpoint": Checkpoint(monitor="val/loss"),
    }
    trainer = make_trainer(callbacks, folder)
    trainer.fit()
    trainer.log({"test/loss": 0.25})
    if state != "killed":
        trainer.end(Results(state))
    return Job(number, folder, {SWEPT: str(number)}, state=state)


def test_each_job_of_a_sweep_has_a_row_with_what_varies_and_how_it_ended(make_trainer, tmp_path):
    (tmp_path / "sweep.json").write_text(json.dumps({"swept": [SWEPT]}))
    jobs = []
    for number, state in enumerate(STATES):
        jobs.append(run_job(make_trainer, tmp_path / str(number), number, state))
    link_jobs(tmp_path, jobs, [SWEPT])

    experiment, rows = tab(tmp_path / "tensorboard")

    hparams = [info.name for info in experiment.hparam_infos]
    metrics = [info.name.tag for info in experiment.metric_infos]

    assert hparams == [SWEPT]  # the first five are ticked
    assert metrics == ["best/val/loss", "test/loss", "test/accuracy"]

    statuses = []
    for number in range(len(STATES)):
        _, session = rows[f"weight_decay={number}"]
        statuses.append(session.status)
    assert statuses[:2] == [api_pb2.STATUS_SUCCESS] * 2
    assert statuses[2:] == [api_pb2.STATUS_UNKNOWN] * 4

    group, _ = rows["weight_decay=0"]
    values = {value.name.tag: value.value for value in group.metric_values}
    index = (tmp_path / "0" / "checkpoints" / "index.json").read_text()

    assert group.hparams[SWEPT].number_value == 0
    assert values["test/loss"] == 0.25
    assert str(values["best/val/loss"])[:8] in index


def test_command_is_safe_to_paste():
    plain = command(Path("runs/net/1"))
    odd = command(Path("/my runs/net:1"))
    assert plain == "tensorboard --logdir runs/net/1/tensorboard"
    assert odd == "tensorboard --logdir '/my runs/net:1/tensorboard'"
