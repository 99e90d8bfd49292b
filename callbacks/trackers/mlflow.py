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
from regimen.trainer.callback import Media, Results

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
        require(
            not separator or scheme.partition("+")[0] in _SCHEMES,
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
        self._client = client = importlib.import_module("mlflow").MlflowClient(self.tracking_uri)
        self._id, store = tracked.get("run_id", ""), str(client.tracking_uri)
        if self._id:
            try:
                client.update_run(self._id, status="RUNNING")
                return dict(tracked), ""
            except Exception as error:
                if getattr(error, "error_code", "") != "RESOURCE_DOES_NOT_EXIST":
                    raise
        experiment = self.experiment or names.project
        with suppress(Exception):  # it is there already, or another job of a sweep is faster
            client.create_experiment(experiment)
        number = client.get_experiment_by_name(experiment).experiment_id
        tags = {"run_dir": self.run.as_uri()} | ({"sweep": names.sweep} if names.sweep else {})
        if names.tags:
            tags |= {"tags": ", ".join(names.tags)}
        self._id = client.create_run(number, tags=tags, run_name=names.run).info.run_id
        param = importlib.import_module("mlflow.entities").Param
        params = [param(_key(k), str(v)[:_LONGEST]) for k, v in leaves(names.config)]
        for at in range(0, len(params), _PARAMS):
            client.log_batch(self._id, params=params[at : at + _PARAMS])
        client.log_dict(self._id, names.config, "config.yaml")
        return {"run_id": self._id}, f"run {self._id} in {store}"

    def send(self, step: int, values: Mapping[str, float | Media]) -> None:
        """Send values at a step, or store a file `<name>/step-<step>`."""
        metric, now, metrics = importlib.import_module("mlflow.entities").Metric, time.time(), []
        for name, value in values.items():
            if isinstance(value, float | int):
                metrics.append(metric(_key(name), float(value), int(now * 1000), step))
            elif isinstance(value, np.ndarray):
                self._client.log_image(self._id, value, f"{_key(name)}/step-{step:08d}.png")
            else:
                ending, text = as_text(value)
                self._client.log_text(self._id, text, f"{_key(name)}/step-{step:08d}.{ending}")
        if metrics:
            self._client.log_batch(self._id, metrics=metrics)

    def send_end(self, results: Results, files: Mapping[str, Path]) -> None:
        """Send the files of the run, and how it ended."""
        self._client.set_tag(self._id, "state", results.state)
        if results.reason:
            self._client.set_tag(self._id, "reason", results.reason)
        if self.artifacts == "files":
            for place, path in files.items():
                folder = (Path("run") / place).parent.as_posix()
                self._client.log_artifact(self._id, str(path), folder)
        elif links := [
            {"path": place, "uri": path.as_uri(), "bytes": path.stat().st_size}
            for place, path in files.items()
        ]:
            self._client.log_dict(self._id, links, "run_directory.json")
        self._client.set_terminated(self._id, _STATUS.get(results.state, "KILLED"))


def _key(name: str) -> str:
    """Return a name in the characters that MLflow takes."""
    return re.sub(r"[^\w\-./ ]", "_", name, flags=re.ASCII)[:250]
