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
    client = client_of(store)
    return [r for e in client.search_experiments() for r in client.search_runs([e.experiment_id])]


def series(store):
    (run,) = runs(store)
    client = client_of(store)
    return {
        key: [(m.step, m.value) for m in client.get_metric_history(run.info.run_id, key)]
        for key in run.data.metrics
    }


def artifacts(store, folder=None):
    client, (run,) = client_of(store), runs(store)
    found = client.list_artifacts(run.info.run_id, folder)
    inner = [path for f in found if f.is_dir for path in artifacts(store, f.path)]
    return [f.path for f in found if not f.is_dir] + inner


@pytest.mark.parametrize("cut", [3, 5])
def test_mlflow_has_one_run_with_the_points_of_one_never_interrupted(run_twice, store, cut):
    run_twice(lambda name: MLflow(tracking_uri=f"{store}-{name}", artifacts=None), cut)
    assert series(f"{store}-cut") == series(f"{store}-whole")
    assert [run.info.status for run in runs(f"{store}-cut")] == ["FINISHED"]


@pytest.mark.parametrize(
    ("state", "status"),
    [("pruned", "FINISHED"), ("stopped", "KILLED"), ("failed", "FAILED")],
)
def test_mlflow_statuses_and_links_to_the_files_of_a_run_that_is_over(
    make_trainer, tmp_path, store, state, status
):
    trainer = make_trainer({"mlflow": MLflow(tracking_uri=store)}, tmp_path / "run")
    trainer.fit()
    (tmp_path / "run" / "a.txt").write_text("abc")
    trainer.end(Results(state))
    (run,) = runs(store)
    assert (run.info.status, run.data.tags["state"]) == (status, state)
    assert run.data.tags["run_dir"] == (tmp_path / "run").as_uri()
    listed = [] if status == "KILLED" else ["run_directory.json"]
    assert artifacts(store) == ["config.yaml", *listed]
    if status != "KILLED":
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
    assert sorted(artifacts(store)) == [
        "config.yaml",
        "run/config.yaml",
        "run/overrides.yaml",
        "samples/val/step-00000010.png",
        "words/step-00000010.md",
    ]


@pytest.mark.usefixtures("mlflow")
def test_mlflow_a_server_that_is_down_is_one_warning(make_trainer, tmp_path, caplog):
    trainer = make_trainer({"mlflow": MLflow(tracking_uri="http://127.0.0.1:9")}, tmp_path / "run")
    trainer.fit()
    trainer.end(Results("preempted", code=143))
    assert trainer.state.global_step == 10
    texts = [r.getMessage() for r in caplog.records if r.name.startswith("callbacks")]
    assert len(texts) == 1
    assert texts[0].startswith("callbacks.mlflow: ")
    assert texts[0].endswith("; training continues without it")


_BLOCK, _HEAD = 32768, 7


@pytest.fixture
def wandb():
    library = pytest.importorskip("wandb", reason="wandb is not installed (a large extra)")
    yield library
    library.teardown()


def records(file):
    """Yield the records of a `.wandb` file, in LevelDB's log format after a header of 7 bytes."""
    from wandb.proto import wandb_internal_pb2

    content, at, parts = file.read_bytes(), 7, b""
    while at + _HEAD <= len(content):
        if _BLOCK - at % _BLOCK < _HEAD:
            at += _BLOCK - at % _BLOCK
            continue
        _, size, kind = struct.unpack("<IHB", content[at : at + _HEAD])
        if not kind:
            return
        parts += content[at + _HEAD : at + _HEAD + size]
        at += _HEAD + size
        if kind in (1, 4):  # whole, last
            yield wandb_internal_pb2.Record.FromString(parts)
            parts = b""


def read(run):
    importlib.import_module("wandb").teardown()  # its process has written all when it has ended
    files = sorted((run / "wandb").glob("offline-run-*/*.wandb"))
    return [record for file in files for record in records(file)]


def history(run):
    return [
        {"/".join(i.nested_key) or i.key: json.loads(i.value_json) for i in record.history.item}
        for record in read(run)
        if record.HasField("history")
    ]


def curves(run):
    return {
        (row["global_step"], key, value)
        for row in history(run)
        for key, value in row.items()
        if not key.startswith("_")
    }


@pytest.mark.usefixtures("wandb")
def test_wandb_has_one_run_with_the_points_of_one_never_interrupted(run_twice, tmp_path):
    run_twice(lambda _: WandB(), 3)
    assert curves(tmp_path / "cut") == curves(tmp_path / "whole") != set()
    steps = [row["_step"] for row in history(tmp_path / "cut")]
    assert steps == sorted(set(steps))  # of three processes
    names = {path.name.split("-")[3] for path in (tmp_path / "cut" / "wandb").glob("offline-*")}
    assert len(names) == 1


@pytest.mark.usefixtures("wandb")
def test_wandb_config_group_pictures_files_and_the_end(make_trainer, job):
    trainer = make_trainer({"wandb": WandB()}, job)
    trainer.fit()
    trainer.log_image("samples/val", np.zeros((2, 3, 3), np.uint8))
    trainer.log_text("words", "<hi>")
    trainer.log_histogram("weights", torch.tensor([0.0, 1.0, 1.0]), bins=2)
    trainer.end(Results("finished", {"val/loss": 0.5}))
    found = read(job)
    (begun,) = [r.run for r in found if r.HasField("run")]
    assert (begun.project, begun.display_name, begun.run_group) == ("mine", "width=3", "mine/night")
    settings = {u.key: json.loads(u.value_json) for u in begun.config.update}
    assert settings["model"] == {"width": 3}
    last = {key: value for row in history(job) for key, value in row.items()}
    assert last["samples/val/_type"] == "image-file"
    assert last["words/_type"] == "html-file"
    assert last["weights/values"] == [1, 2]
    summary = {
        u.key: json.loads(u.value_json)
        for r in found
        if r.HasField("summary")
        for u in r.summary.update
    }
    assert (summary["state"], summary["val/loss"]) == ("finished", 0.5)
    asked = [r.request for r in found if r.HasField("request")]
    (artifact,) = [r.log_artifact.artifact for r in asked if r.HasField("log_artifact")] or [
        r.artifact for r in found if r.HasField("artifact")
    ]
    listed = {entry.path: entry.ref for entry in artifact.manifest.contents}
    assert listed["config.yaml"] == (job / "config.yaml").as_uri()
    assert [r.exit.exit_code for r in found if r.HasField("exit")] == [0]


@pytest.mark.usefixtures("wandb")
@pytest.mark.parametrize(
    ("state", "code"), [("pruned", 0), ("stopped", 0), ("preempted", 143), ("failed", 5)]
)
def test_wandb_statuses(make_trainer, tmp_path, state, code):
    trainer = make_trainer({"wandb": WandB(artifacts=None)}, tmp_path)
    trainer.fit()
    trainer.end(Results(state, code=code))
    found = read(tmp_path)
    assert [r.exit.exit_code for r in found if r.HasField("exit")] == [code]
    assert any(r.HasField("preempting") for r in found) == (state == "preempted")
