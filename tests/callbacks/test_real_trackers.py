"""Against the real MLflow and Weights & Biases (offline): `uv pip install mlflow wandb`."""

import importlib
import json
import struct

import numpy as np
import pytest
import torch

from regimen.callbacks.trackers.mlflow import MLflow
from regimen.callbacks.trackers.wandb import WandB
from regimen.trainer.callback import Results


@pytest.fixture
def job(tmp_path):
    """Return the folder of a job of a sweep."""
    folder = tmp_path / "night" / "0"
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(f"name: mine\nmodel: {{width: 3}}\nx: [{'1,' * 400}]")
    (folder / "overrides.yaml").write_text("- model.width=3\n")
    (folder.parent / "sweep.json").write_text('{"swept": ["model.width"]}')
    return folder


@pytest.fixture
def mlflow():
    return pytest.importorskip("mlflow", reason="MLflow is not installed (a large extra)")


@pytest.fixture
def store(mlflow, tmp_path, monkeypatch):
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    return str(tmp_path / "store")


def client_of(store):
    return importlib.import_module("mlflow").MlflowClient(store)


def runs(store):
    """Return the runs of all experiments."""
    client = client_of(store)
    found = []
    for experiment in client.search_experiments():
        found += client.search_runs([experiment.experiment_id])
    return found


def series(store):
    """Return the points of each metric of the one run."""
    (run,) = runs(store)
    client = client_of(store)
    found = {}
    for key in run.data.metrics:
        history = client.get_metric_history(run.info.run_id, key)
        found[key] = [(point.step, point.value) for point in history]
    return found


def artifacts(store, folder=None):
    """Return the paths of all files of the one run."""
    client = client_of(store)
    (run,) = runs(store)
    paths = []
    for file in client.list_artifacts(run.info.run_id, folder):
        if file.is_dir:
            paths += artifacts(store, file.path)
        else:
            paths.append(file.path)
    return sorted(paths)


@pytest.mark.parametrize("cut", [3, 5])
def test_mlflow_has_one_run_with_the_points_of_one_never_interrupted(run_twice, store, cut):
    run_twice(lambda name: MLflow(tracking_uri=f"{store}-{name}", artifacts=None), cut)
    (run,) = runs(f"{store}-cut")
    assert run.info.status == "FINISHED"
    assert series(f"{store}-cut") == series(f"{store}-whole")


@pytest.mark.parametrize(
    ("state", "status", "files"),
    [
        ("pruned", "FINISHED", ["config.yaml", "run_directory.json"]),
        ("stopped", "KILLED", ["config.yaml"]),
        ("failed", "FAILED", ["config.yaml", "run_directory.json"]),
    ],
)
def test_mlflow_statuses_and_links_to_the_files_of_a_run_that_is_over(
    make_trainer, tmp_path, store, state, status, files
):
    path = tmp_path / "run"
    trainer = make_trainer({"mlflow": MLflow(tracking_uri=store)}, path)
    trainer.fit()
    (path / "a.txt").write_text("abc")
    trainer.end(Results(state))

    (run,) = runs(store)

    assert run.info.status == status
    assert run.data.tags["state"] == state
    assert run.data.tags["run_dir"] == path.as_uri()
    assert artifacts(store) == files

    if "run_directory.json" in files:
        place = f"{run.info.artifact_uri}/run_directory.json"
        text = importlib.import_module("mlflow").artifacts.load_text(place)
        assert '"path": "a.txt"' in text


@pytest.mark.usefixtures("mlflow")
def test_mlflow_config_values_pictures_and_files(make_trainer, tmp_path, job, monkeypatch):
    monkeypatch.chdir(tmp_path)  # where MLflow keeps artifacts beside a database
    store = f"sqlite:///{tmp_path}/mlflow.db"
    (job / "large.bin").write_bytes(bytes(20_000))
    tracker = MLflow(tracking_uri=store, artifacts="files", max_megabytes=0.01)
    trainer = make_trainer({"mlflow": tracker}, job)
    trainer.fit()
    trainer.log_image("samples/val", np.zeros((2, 3, 3), np.uint8))
    trainer.log_text("words", "hi")
    trainer.log({"f1/two words: ü": 0.5, "nan": float("nan")})
    trainer.end(Results("finished", {"val/loss": 1.0}))

    (run,) = runs(store)

    assert run.info.run_name == "width=3"
    assert run.data.tags["sweep"] == "mine/night"
    assert run.data.params["model.width"] == "3"
    assert run.data.metrics["f1/two words_ _"] == 0.5
    assert artifacts(store) == [
        "config.yaml",
        "run/config.yaml",
        "run/overrides.yaml",
        "samples/val/step-00000010.png",
        "words/step-00000010.md",
    ]


@pytest.mark.usefixtures("mlflow")
def test_mlflow_a_server_that_is_down_is_one_warning(make_trainer, tmp_path, caplog):
    tracker = MLflow(tracking_uri="http://127.0.0.1:9")
    trainer = make_trainer({"mlflow": tracker}, tmp_path / "run")
    trainer.fit()
    trainer.end(Results("preempted", code=143))

    ours = [record for record in caplog.records if record.name.startswith("regimen.callbacks")]
    (text,) = [record.getMessage() for record in ours]

    assert trainer.state.global_step == 10
    assert text.startswith("callbacks.mlflow: ")
    assert text.endswith("; training continues without it")


_BLOCK = 32768
_HEAD = 7


@pytest.fixture
def wandb():
    library = pytest.importorskip("wandb", reason="wandb is not installed (a large extra)")
    yield library
    library.teardown()


def records(file):
    """Yield the records of a `.wandb` file, in LevelDB's log format after a header of 7 bytes.

    A record is in parts, each with its own header, and no header lies across two blocks.
    """
    from wandb.proto import wandb_internal_pb2

    content = file.read_bytes()
    at = 7
    parts = b""
    while at + _HEAD <= len(content):
        left_in_block = _BLOCK - at % _BLOCK
        if left_in_block < _HEAD:
            at += left_in_block
            continue
        _, size, kind = struct.unpack("<IHB", content[at : at + _HEAD])
        if kind == 0:  # nothing was written from here on
            return
        begin = at + _HEAD
        parts += content[begin : begin + size]
        at = begin + size
        if kind in (1, 4):  # whole, last
            yield wandb_internal_pb2.Record.FromString(parts)
            parts = b""


def read(run):
    """Return the records of a run."""
    importlib.import_module("wandb").teardown()  # its process has written all when it has ended
    found = []
    for file in sorted((run / "wandb").glob("offline-run-*/*.wandb")):
        found += records(file)
    return found


def of_kind(found, kind):
    """Return those of the records that are of a kind."""
    return [getattr(record, kind) for record in found if record.HasField(kind)]


def history(run):
    """Return the rows that were logged."""
    rows = []
    for entry in of_kind(read(run), "history"):
        row = {}
        for item in entry.item:
            name = "/".join(item.nested_key) or item.key
            row[name] = json.loads(item.value_json)
        rows.append(row)
    return rows


def curves(run):
    """Return the points of all curves: step, name and value."""
    points = set()
    for row in history(run):
        for name, value in row.items():
            if not name.startswith("_"):
                points.add((row["global_step"], name, value))
    return points


@pytest.mark.usefixtures("wandb")
def test_wandb_has_one_run_with_the_points_of_one_never_interrupted(run_twice, tmp_path):
    run_twice(lambda _: WandB(), 3)

    cut = tmp_path / "cut"
    whole = curves(tmp_path / "whole")

    assert whole
    assert curves(cut) == whole

    steps = [row["_step"] for row in history(cut)]
    assert steps == sorted(set(steps))  # of three processes

    folders = (cut / "wandb").glob("offline-*")
    ids = {folder.name.split("-")[3] for folder in folders}
    assert len(ids) == 1


def values_of(entry):
    """Return the values that a record updates."""
    return {update.key: json.loads(update.value_json) for update in entry.update}


def artifact_of(found):
    """Return the one artifact: in a request, or by itself."""
    requests = of_kind(found, "request")
    logged = [entry.artifact for entry in of_kind(requests, "log_artifact")]
    (artifact,) = logged or of_kind(found, "artifact")
    return artifact


@pytest.mark.usefixtures("wandb")
def test_wandb_config_group_pictures_files_and_the_end(make_trainer, job):
    trainer = make_trainer({"wandb": WandB()}, job)
    trainer.fit()
    trainer.log_image("samples/val", np.zeros((2, 3, 3), np.uint8))
    trainer.log_text("words", "<hi>")
    trainer.log_histogram("weights", torch.tensor([0.0, 1.0, 1.0]), bins=2)
    trainer.end(Results("finished", {"val/loss": 0.5}))

    found = read(job)
    (begun,) = of_kind(found, "run")

    assert begun.project == "mine"
    assert begun.display_name == "width=3"
    assert begun.run_group == "mine/night"
    assert values_of(begun.config)["model"] == {"width": 3}

    last = {}
    for row in history(job):
        last |= row
    assert last["samples/val/_type"] == "image-file"
    assert last["words/_type"] == "html-file"
    assert last["weights/values"] == [1, 2]

    summary = {}
    for entry in of_kind(found, "summary"):
        summary |= values_of(entry)
    assert summary["state"] == "finished"
    assert summary["val/loss"] == 0.5

    files = {entry.path: entry.ref for entry in artifact_of(found).manifest.contents}
    (end,) = of_kind(found, "exit")
    assert files["config.yaml"] == (job / "config.yaml").as_uri()
    assert end.exit_code == 0


@pytest.mark.usefixtures("wandb")
@pytest.mark.parametrize(
    ("state", "code"), [("pruned", 0), ("stopped", 0), ("preempted", 143), ("failed", 5)]
)
def test_wandb_statuses(make_trainer, tmp_path, state, code):
    trainer = make_trainer({"wandb": WandB(artifacts=None)}, tmp_path)
    trainer.fit()
    trainer.end(Results(state, code=code))

    found = read(tmp_path)
    (end,) = of_kind(found, "exit")
    is_preempted = of_kind(found, "preempting") != []

    assert end.exit_code == code
    assert is_preempted == (state == "preempted")
