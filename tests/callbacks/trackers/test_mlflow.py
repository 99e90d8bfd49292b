"""Against the real MLflow, in a folder and in SQLite: `uv pip install mlflow` runs them."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from callbacks.trackers.mlflow import MLflow
from conf.errors import ConfigError
from trainer.callback import Results

mlflow = pytest.importorskip("mlflow", reason="MLflow is not installed (a large extra)")


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    return str(tmp_path / "store")


def runs(store: str) -> list[Any]:
    client = mlflow.MlflowClient(store)
    return [r for e in client.search_experiments() for r in client.search_runs([e.experiment_id])]


def series(store: str) -> dict[str, list[tuple[int, float]]]:
    (run,) = runs(store)
    client = mlflow.MlflowClient(store)
    return {
        key: [(m.step, m.value) for m in client.get_metric_history(run.info.run_id, key)]
        for key in run.data.metrics
    }


def artifacts(store: str, folder: str | None = None) -> list[str]:
    client, (run,) = mlflow.MlflowClient(store), runs(store)
    found = client.list_artifacts(run.info.run_id, folder)
    inner = [path for f in found if f.is_dir for path in artifacts(store, f.path)]
    return [f.path for f in found if not f.is_dir] + inner


@pytest.mark.parametrize("cut", [3, 5])
def test_a_resumed_run_is_one_run_with_the_points_of_one_never_interrupted(
    make_trainer: Any, tmp_path: Path, store: str, stop_at: Any, carry_over: Any, cut: int
) -> None:
    make_trainer({"mlflow": MLflow(store + "0")}, tmp_path / "whole").fit()
    first = make_trainer({"mlflow": MLflow(store), "stop": stop_at(cut)}, tmp_path / "cut")
    second = make_trainer({"mlflow": MLflow(store)}, tmp_path / "cut")
    third = make_trainer({"mlflow": MLflow(store)}, tmp_path / "cut")
    first.fit()
    first.end(Results("preempted", code=143))
    carry_over(first, second)
    carry_over(first, third)
    second.fit()  # killed at its end
    third.fit()
    assert series(store) == series(store + "0")
    assert [run.info.status for run in runs(store)] == ["RUNNING"]


@pytest.mark.parametrize(
    ("state", "status"),
    [
        pytest.param("finished", "FINISHED", id="finished"),
        pytest.param("pruned", "FINISHED", id="pruned"),
        pytest.param("stopped", "KILLED", id="stopped"),
        pytest.param("preempted", "KILLED", id="preempted"),
        pytest.param("failed", "FAILED", id="failed"),
    ],
)
def test_statuses(make_trainer: Any, tmp_path: Path, store: str, state: str, status: str) -> None:
    trainer = make_trainer({"mlflow": MLflow(store, artifacts=None)}, tmp_path / "run")
    trainer.fit()
    trainer.end(Results(state))
    (run,) = runs(store)
    assert (run.info.status, run.data.tags["state"]) == (status, state)


def test_config_values_pictures_and_files(
    make_trainer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # where MLflow keeps artifacts beside a database
    store = f"sqlite:///{tmp_path}/mlflow.db"
    folder = tmp_path / "night" / "0"
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(
        "name: mine\nmodel: {width: 3}\n" + "x: [" + "1," * 400 + "]"
    )
    (folder / "overrides.yaml").write_text("- model.width=3\n")
    (folder.parent / "sweep.json").write_text('{"swept": ["model.width"]}')
    (folder / "large.bin").write_bytes(bytes(20_000))
    tracker = MLflow(store, artifacts="files", max_megabytes=0.01)
    trainer = make_trainer({"mlflow": tracker}, folder)
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


def test_links_are_a_list_of_the_files(make_trainer: Any, tmp_path: Path, store: str) -> None:
    trainer = make_trainer({"mlflow": MLflow(store)}, tmp_path / "run")
    trainer.fit()
    (tmp_path / "run" / "a.txt").write_text("abc")
    trainer.end(Results("finished"))
    assert artifacts(store) == ["run_directory.json"]
    client, (run,) = mlflow.MlflowClient(store), runs(store)
    text = mlflow.artifacts.load_text(f"{run.info.artifact_uri}/run_directory.json")
    assert '"path": "a.txt"' in text
    assert client.get_run(run.info.run_id).data.tags["run_dir"] == (tmp_path / "run").as_uri()


def test_a_server_that_is_down_is_one_warning(
    make_trainer: Any, tmp_path: Path, caplog: Any
) -> None:
    trainer = make_trainer({"mlflow": MLflow("http://127.0.0.1:9")}, tmp_path / "run")
    trainer.fit()
    trainer.end(Results("preempted", code=143))
    assert trainer.state.global_step == 10
    texts = [r.getMessage() for r in caplog.records if r.name.startswith("callbacks")]
    assert len(texts) == 1
    assert texts[0].startswith("callbacks.mlflow: ")
    assert texts[0].endswith("; training continues without it")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        pytest.param({"tracking_uri": "ftp://x"}, "choose sqlite:///FILE", id="scheme"),
        pytest.param({"artifacts": "all"}, "choose links, files or null", id="artifacts"),
        pytest.param({"max_megabytes": 0}, "choose a positive number", id="bound"),
    ],
)
def test_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        MLflow(**options)
