"""Send a run to MLflow."""

import importlib
import logging
import os
import re
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from regimen.callbacks.support import require
from regimen.callbacks.trackers.recorder import Names, Tracker, as_text, leaves
from regimen.trainer.callback import Results
from regimen.trainer.media import Media

_STATUS = {"finished": "FINISHED", "pruned": "FINISHED", "failed": "FAILED"}  # others: KILLED
_SCHEMES = ("", "file", "sqlite", "postgresql", "mysql", "mssql", "http", "https", "databricks")
_SETTINGS = {  # no telemetry, no hints, and no minutes of waiting for a dead server
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_ALLOW_FILE_STORE": "true",  # the user chose the folder
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",
    "MLFLOW_LOGGING_LEVEL": "WARNING",
}
_PARAMS_A_REQUEST = 100
_LONGEST_VALUE = 500  # characters


@dataclass(eq=False, kw_only=True)
class MLflow(Tracker):
    """Send values, configuration, pictures and the run's files to MLflow.

    `tracking_uri`: an SQLite file, a folder, a server; None: what `MLFLOW_TRACKING_URI` says, or
    `mlflow.db` in the working folder. `experiment`: None: the run's `name`. `artifacts`: `links`
    lists the files of the run directory with their places, `files` uploads them up to
    `max_megabytes` in all, the small ones first. Jobs of a sweep have the same tag `sweep`.
    """

    tracking_uri: str | None = None
    experiment: str | None = None
    package = "mlflow"

    def __post_init__(self) -> None:
        super().__post_init__()
        scheme, separator, _ = (self.tracking_uri or "").partition("://")
        dialect = scheme.partition("+")[0]  # postgresql+psycopg
        require(
            not separator or dialect in _SCHEMES,
            f"tracking_uri={self.tracking_uri!r}: choose sqlite:///FILE, a folder, or the URL of a "
            "server (http, https)",
        )
        self._client: Any = None
        self._id = ""

    def connect(self, names: Names, tracked: Mapping[str, str]) -> tuple[dict[str, str], str]:
        """Go on with a run, if its store has it, or create one."""
        for key, value in _SETTINGS.items():
            os.environ.setdefault(key, value)
        for library in ("mlflow", "alembic"):
            logging.getLogger(library).setLevel(logging.WARNING)
        client = importlib.import_module("mlflow").MlflowClient(self.tracking_uri)
        self._client = client
        self._id = tracked.get("run_id", "")
        store = str(client.tracking_uri)
        if self._id:
            try:
                client.update_run(self._id, status="RUNNING")
                return dict(tracked), ""
            except Exception as error:
                if getattr(error, "error_code", "") != "RESOURCE_DOES_NOT_EXIST":
                    raise

        experiment = self.experiment or names.project
        with suppress(Exception):  # it exists already, or another job of a sweep is faster
            client.create_experiment(experiment)
        experiment_id = client.get_experiment_by_name(experiment).experiment_id
        tags = {"run_dir": self.run.as_uri()}
        if names.sweep:
            tags["sweep"] = names.sweep
        if names.tags:
            tags["tags"] = ", ".join(names.tags)
        self._id = client.create_run(experiment_id, tags=tags, run_name=names.run).info.run_id
        self._send_config(names.config)
        return {"run_id": self._id}, f"run {self._id} in {store}"

    def _send_config(self, config: dict[str, Any]) -> None:
        make = importlib.import_module("mlflow.entities").Param
        params = [make(_key(key), str(value)[:_LONGEST_VALUE]) for key, value in leaves(config)]
        for start in range(0, len(params), _PARAMS_A_REQUEST):
            self._client.log_batch(self._id, params=params[start : start + _PARAMS_A_REQUEST])
        self._client.log_dict(self._id, config, "config.yaml")

    def send(self, step: int, values: Mapping[str, float | Media]) -> None:
        """Send values at a step, or store a file `<name>/step-<step>`."""
        make = importlib.import_module("mlflow.entities").Metric
        milliseconds = int(time.time() * 1000)
        client = self._client
        metrics = []
        for name, value in values.items():
            key = _key(name)
            if isinstance(value, float | int):
                metrics.append(make(key, float(value), milliseconds, step))
            elif isinstance(value, np.ndarray):
                client.log_image(self._id, value, f"{key}/step-{step:08d}.png")
            else:
                ending, text = as_text(value)
                client.log_text(self._id, text, f"{key}/step-{step:08d}.{ending}")
        if metrics:
            client.log_batch(self._id, metrics=metrics)

    def send_end(self, results: Results, files: Mapping[str, Path]) -> None:
        """Send the files of the run, and how it ended."""
        client = self._client
        run_id = self._id
        client.set_tag(run_id, "state", results.state)
        if results.reason:
            client.set_tag(run_id, "reason", results.reason)
        if self.artifacts == "files":
            for place, path in files.items():
                folder = (Path("run") / place).parent.as_posix()
                client.log_artifact(run_id, str(path), folder)
        elif files:
            links = []
            for place, path in files.items():
                size = path.stat().st_size
                links.append({"path": place, "uri": path.as_uri(), "bytes": size})
            client.log_dict(run_id, links, "run_directory.json")
        client.set_terminated(run_id, _STATUS.get(results.state, "KILLED"))


def _key(name: str) -> str:
    """Return a name in the characters that MLflow takes."""
    return re.sub(r"[^\w\-./ ]", "_", name, flags=re.ASCII)[:250]
