"""Send a run to MLflow."""

from __future__ import annotations

import importlib
import json
import logging
import re
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import quote

from callbacks.support.errors import CallbackError
from callbacks.support.run_files import as_file, listing
from callbacks.support.settings import leaves
from callbacks.support.tracking import Names, Tracker, environment
from trainer.callback import Results
from trainer.runs.directory import CONFIG

_STATUS = {
    "finished": "FINISHED",
    "pruned": "FINISHED",
    "stopped": "KILLED",
    "preempted": "KILLED",
    "failed": "FAILED",
}
_SCHEMES = ("", "file", "sqlite", "postgresql", "mysql", "mssql", "http", "https", "databricks")
_PARAMS, _LONGEST = 100, 500  # in a request, characters of a value


class MLflow(Tracker):
    """Send values, configuration, pictures and the run's files to MLflow.

    `tracking_uri`: an SQLite file, a folder, a server; None: what `MLFLOW_TRACKING_URI` says, or
    `mlflow.db` in the working folder. `experiment`: None: the run's `name`. `artifacts`: `links`
    lists the files of the run directory with their places, `files` uploads them up to
    `max_megabytes` in all, the small ones first. Jobs of a sweep have the same tag `sweep`.
    """

    package = "mlflow"

    def __init__(
        self,
        tracking_uri: str | None = None,
        experiment: str | None = None,
        artifacts: str | None = "links",
        max_megabytes: float = 100.0,
    ) -> None:
        scheme = (tracking_uri or "").partition("://")[0] if "://" in (tracking_uri or "") else ""
        if scheme.partition("+")[0] not in _SCHEMES:
            raise CallbackError(
                f"tracking_uri={tracking_uri!r}: choose sqlite:///FILE, a folder, or the URL of a "
                "server (http, https)"
            )
        super().__init__(artifacts, max_megabytes)
        self._uri = tracking_uri
        self._experiment = experiment
        self._client: Any = None
        self._id: str | None = None

    def key(self, name: str) -> str:
        """Return a name in the characters that MLflow takes."""
        return re.sub(r"[^\w\-./ ]", "_", name, flags=re.ASCII)[:250]

    def connect(self, names: Names, tracked: Mapping[str, Any]) -> bool:
        """Go on with the run of `tracked`, if its store has it, or create one."""
        with _quiet():
            if self._client is None:
                self._client = importlib.import_module("mlflow").MlflowClient(self._uri)
            known = tracked.get("run_id") if tracked.get("store") == self._store() else None
            if (run := self._existing(known or self._id)) is None:
                self._create(names)
                return True
            self._id = run.info.run_id
            self._client.update_run(self._id, status="RUNNING")
            self.sent = {key: self._last_step(key) for key in run.data.metrics}
            return False

    def begin_anew(self, names: Names) -> None:
        """Mark the tracked run as abandoned, and create another."""
        with _quiet():
            self._client.set_tag(self._id, "state", "abandoned")
            self._client.set_terminated(self._id, "KILLED")
            self._create(names)

    def send(self, step: int, values: Mapping[str, float]) -> None:
        """Send values at a step."""
        metric, now = importlib.import_module("mlflow.entities").Metric, int(time.time() * 1000)
        metrics = [metric(key, float(v), now, step) for key, v in values.items()]
        with _quiet():
            for part in _parts(metrics, 1000):
                self._client.log_batch(self._id, metrics=part)

    def send_shown(self, step: int, name: str, value: Any) -> None:
        """Store a file `<name>/step-<step>`, again under the same name if it is sent again."""
        ending, content = as_file(value)
        self._store_file(f"{self.key(name)}/step-{step:08d}.{ending}", content)

    def send_end(self, results: Results) -> None:
        """Send values that were not logged, the files of the run, and how it ended."""
        final = {self.key(name): value for name, value in results.metrics.items()}
        missing = {key: value for key, value in final.items() if key not in self.sent}
        if missing:
            self.send(max(self.sent.values(), default=0), missing)
        with _quiet():
            self._client.set_tag(self._id, "state", results.state)
            if results.reason:
                self._client.set_tag(self._id, "reason", results.reason)
            if results.state not in ("preempted", "stopped"):
                self._store_run()
            self._client.set_terminated(self._id, _STATUS.get(results.state, "FAILED"))

    def address(self) -> str:
        """Return the command or the address that shows the run."""
        store = self._store()
        if store.startswith("http"):
            return f"run {self._id} on {store}"
        return f"mlflow ui --backend-store-uri {store} --host 127.0.0.1"

    def _store(self) -> str:
        return str(self._client.tracking_uri)

    def _existing(self, run_id: str | None) -> Any:
        if run_id is None:
            return None
        try:
            return self._client.get_run(run_id)
        except Exception as error:
            if getattr(error, "error_code", "") == "RESOURCE_DOES_NOT_EXIST":
                return None
            raise

    def _create(self, names: Names) -> None:
        tags = {"run_dir": self._run.as_uri()} | ({"sweep": names.sweep} if names.sweep else {})
        experiment = self._experiment_id(self._experiment or names.project)
        run = self._client.create_run(experiment, tags=tags, run_name=names.run)
        self._id = run.info.run_id
        self.remember({"run_id": self._id, "store": self._store()})
        param = importlib.import_module("mlflow.entities").Param
        params = [param(self.key(k), str(v)[:_LONGEST]) for k, v in leaves(dict(names.config))]
        for part in _parts(params, _PARAMS):
            self._client.log_batch(self._id, params=part)
        if (config := self._run / CONFIG).exists():
            self._client.log_artifact(self._id, str(config))

    def _experiment_id(self, name: str) -> str:
        for _ in range(2):
            if (found := self._client.get_experiment_by_name(name)) is not None:
                return str(found.experiment_id)
            try:
                return str(self._client.create_experiment(name, self._artifact_root(name)))
            except Exception as error:  # another job of a sweep was faster
                if getattr(error, "error_code", "") != "RESOURCE_ALREADY_EXISTS":
                    raise
        raise CallbackError(f"experiment={name!r} was deleted in MLflow: choose another")

    def _artifact_root(self, name: str) -> str | None:
        """Return a folder beside an SQLite file; MLflow would take the working folder."""
        kind, _, file = self._store().partition(":///")
        if kind != "sqlite":
            return None
        return (Path(file).absolute().parent / "mlruns" / quote(name, safe="")).as_uri()

    def _last_step(self, key: str) -> int:
        return max(int(m.step) for m in self._client.get_metric_history(self._id, key))

    def _store_run(self) -> None:
        files = self.files()
        if self._artifacts == "links":
            text = json.dumps(listing(self._run, files), indent=2)
            self._store_file("run_directory.json", text.encode())
            return
        for path in files:
            folder = path.relative_to(self._run.parent).parent.relative_to(self._run.name)
            self._client.log_artifact(self._id, str(path), (Path("run") / folder).as_posix())

    def _store_file(self, place: str, content: bytes) -> None:
        folder, _, name = place.rpartition("/")
        with tempfile.TemporaryDirectory() as temporary, _quiet():
            path = Path(temporary) / name
            path.write_bytes(content)
            self._client.log_artifact(self._id, str(path), folder or None)


def _parts(values: Iterable[Any], size: int) -> Iterable[list[Any]]:
    values = list(values)
    return (values[at : at + size] for at in range(0, len(values), size))


@contextmanager
def _quiet() -> Iterator[None]:
    """Be in a call: no telemetry, no remarks, and no minutes of waiting for a dead server."""
    loggers = [logging.getLogger(name) for name in ("mlflow", "alembic")]
    levels = [logger.level for logger in loggers]
    with environment(
        MLFLOW_DISABLE_TELEMETRY="true",
        MLFLOW_ALLOW_FILE_STORE="true",  # a folder that a person has named
        MLFLOW_HTTP_REQUEST_MAX_RETRIES="1",
        MLFLOW_HTTP_REQUEST_TIMEOUT="10",
        MLFLOW_LOGGING_LEVEL="WARNING",
    ):
        try:
            for logger in loggers:
                logger.setLevel(logging.WARNING)
            yield
        finally:
            for logger, level in zip(loggers, levels, strict=True):
                logger.setLevel(level)
