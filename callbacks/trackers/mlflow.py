"""Send a run to MLflow."""

import importlib
import logging
import os
import re
import tempfile
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from callbacks.support import CallbackError
from callbacks.trackers.recorder import Names, Tracker, as_file, leaves
from trainer.callback import Results
from trainer.media import Media
from trainer.runs.directory import CONFIG

_STATUS = {"finished": "FINISHED", "pruned": "FINISHED", "failed": "FAILED"}  # others: KILLED
_SCHEMES = ("", "file", "sqlite", "postgresql", "mysql", "mssql", "http", "https", "databricks")
_SETTINGS = {  # no telemetry, no remarks, and no minutes of waiting for a dead server
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_ALLOW_FILE_STORE": "true",  # a folder that a person has named
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",
    "MLFLOW_LOGGING_LEVEL": "WARNING",
}
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
        scheme, separator, _ = (tracking_uri or "").partition("://")
        if separator and scheme.partition("+")[0] not in _SCHEMES:
            raise CallbackError(
                f"tracking_uri={tracking_uri!r}: choose sqlite:///FILE, a folder, or the URL of a "
                "server (http, https)"
            )
        super().__init__(artifacts, max_megabytes)
        self._uri = tracking_uri
        self._experiment = experiment
        self._client: Any = None
        self._id = ""

    def connect(self, names: Names, tracked: Mapping[str, str]) -> dict[str, str]:
        """Go on with a run, if its store has it, or create one."""
        for key, value in _SETTINGS.items():
            os.environ.setdefault(key, value)
        for library in ("mlflow", "alembic"):
            logging.getLogger(library).setLevel(logging.WARNING)
        self._client = importlib.import_module("mlflow").MlflowClient(self._uri)
        self._id, store = tracked.get("run_id", ""), str(self._client.tracking_uri)
        if self._id and tracked.get("store") == store:
            try:
                self._client.update_run(self._id, status="RUNNING")
                return dict(tracked)
            except Exception as error:
                if getattr(error, "error_code", "") != "RESOURCE_DOES_NOT_EXIST":
                    raise
        self._create(names)
        return {"run_id": self._id, "store": store}

    def address(self) -> str:
        """Return the command or the address that shows the run."""
        store = str(self._client.tracking_uri)
        if store.startswith("http"):
            return f"run {self._id} on {store}"
        return f"mlflow ui --backend-store-uri {store} --host 127.0.0.1"

    def send(self, step: int, values: Mapping[str, float]) -> None:
        """Send values at a step."""
        metric, now = importlib.import_module("mlflow.entities").Metric, int(time.time() * 1000)
        metrics = [metric(_key(name), float(v), now, step) for name, v in values.items()]
        self._client.log_batch(self._id, metrics=metrics)

    def send_media(self, step: int, name: str, media: Media) -> None:
        """Store a file `<name>/step-<step>`."""
        ending, content = as_file(media)
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / f"step-{step:08d}.{ending}"
            path.write_bytes(content)
            self._client.log_artifact(self._id, str(path), _key(name))

    def send_end(self, results: Results, files: Mapping[str, Path]) -> None:
        """Send the files of the run, and how it ended."""
        self._client.set_tag(self._id, "state", results.state)
        if results.reason:
            self._client.set_tag(self._id, "reason", results.reason)
        links = [
            {"path": place, "uri": path.as_uri(), "bytes": path.stat().st_size}
            for place, path in files.items()
        ]
        if self.artifacts == "files":
            for place, path in files.items():
                folder = (Path("run") / place).parent.as_posix()
                self._client.log_artifact(self._id, str(path), folder)
        elif links:
            self._client.log_dict(self._id, links, "run_directory.json")
        self._client.set_terminated(self._id, _STATUS.get(results.state, "KILLED"))

    def _create(self, names: Names) -> None:
        experiment = self._experiment or names.project
        with suppress(Exception):  # it is there already, or another job of a sweep is faster
            self._client.create_experiment(experiment)
        number = self._client.get_experiment_by_name(experiment).experiment_id
        tags = {"run_dir": self.run.as_uri()} | ({"sweep": names.sweep} if names.sweep else {})
        self._id = self._client.create_run(number, tags=tags, run_name=names.run).info.run_id
        param = importlib.import_module("mlflow.entities").Param
        params = [param(_key(k), str(v)[:_LONGEST]) for k, v in leaves(names.config)]
        for at in range(0, len(params), _PARAMS):
            self._client.log_batch(self._id, params=params[at : at + _PARAMS])
        if (config := self.run / CONFIG).exists():
            self._client.log_artifact(self._id, str(config))


def _key(name: str) -> str:
    """Return a name in the characters that MLflow takes."""
    return re.sub(r"[^\w\-./ ]", "_", name, flags=re.ASCII)[:250]
