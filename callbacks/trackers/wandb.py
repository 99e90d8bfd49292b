"""Send a run to Weights & Biases."""

from __future__ import annotations

import html
import importlib
import json
import secrets
import shlex
from collections.abc import Mapping
from typing import Any

from callbacks.support.errors import CallbackError
from callbacks.support.run_files import listing
from callbacks.support.tracking import Names, Tracker
from trainer.callback import Results
from trainer.files.append_log import AppendLog
from trainer.media import Histogram, PRCurve

_MODES = ("offline", "online")
_STEP = "global_step"  # the axis of all charts
_WAIT = 60.0  # seconds for what is not uploaded at the end


class WandB(Tracker):
    """Send values, configuration, pictures and the run's files to Weights & Biases.

    `mode`: `offline` writes to `wandb/` of the run directory, which `wandb sync` uploads; `online`
    uploads while the run trains. `project`: None: the run's `name`; `entity`: a user or a team.
    `artifacts`: `links` makes an artifact of references to the files of the run directory, `files`
    one with the files, up to `max_megabytes` in all, the small ones first. Jobs of a sweep are one
    group. What was sent stands in `trackers/<name>.jsonl`: an offline run cannot be asked.
    """

    package = "wandb"

    def __init__(
        self,
        mode: str = "offline",
        project: str | None = None,
        entity: str | None = None,
        artifacts: str | None = "links",
        max_megabytes: float = 100.0,
    ) -> None:
        if mode not in _MODES:
            raise CallbackError(f"mode={mode!r}: choose offline or online")
        super().__init__(artifacts, max_megabytes)
        self._mode = mode
        self._project = project
        self._entity = entity
        self._tracked: Any = None  # wandb's run
        self._rows = 0  # sent by all processes of the run
        self._library: Any = None

    def connect(self, names: Names, tracked: Mapping[str, Any]) -> bool:
        """Go on with the run of `tracked`, or begin one."""
        self._library = importlib.import_module("wandb")
        run_id = str(tracked.get("run_id") or secrets.token_hex(4))
        if run_id == tracked.get("run_id"):
            self._read_sent()
        else:
            self._forget_sent()
        self._begin_run(run_id, names)
        return True

    def begin_anew(self, names: Names) -> None:
        """End the tracked run as abandoned, and begin another."""
        self._tracked.summary["state"] = "abandoned"
        self._tracked.finish(exit_code=1)
        self._forget_sent()
        self._begin_run(secrets.token_hex(4), names)

    def send(self, step: int, values: Mapping[str, float]) -> None:
        """Send values at a step."""
        self._row(step, values)

    def send_shown(self, step: int, name: str, value: Any) -> None:
        """Send an image, a histogram, a text or a curve."""
        self._row(step, {name: self._shown(name, value)})

    def send_end(self, results: Results) -> None:
        """Send the last values, the files of the run, and how it ended."""
        self._tracked.summary.update({**results.metrics, "state": results.state})
        if results.state not in ("preempted", "stopped"):
            self._send_files()
        if results.state == "preempted":
            self._tracked.mark_preempting()
        failed = results.state in ("preempted", "failed")
        self._tracked.finish(exit_code=(results.code or 1) if failed else 0)

    def address(self) -> str:
        """Return the address of the run, or the command that uploads it."""
        if self._mode == "online":
            return str(self._tracked.url)
        folder = shlex.quote(str(self._run / "wandb"))
        return f"wandb sync {folder}/offline-run-*-{self._tracked.id}*"

    def _begin_run(self, run_id: str, names: Names) -> None:
        self.remember({"run_id": run_id})
        settings = self._library.Settings(
            silent=True,
            console="off",  # train.log has what is printed
            disable_git=True,  # manifest.json has it
            finish_timeout=_WAIT,
            login_timeout=1.0,  # nobody is asked for a key
            x_disable_meta=True,
        )
        self._tracked = self._library.init(
            id=run_id,
            resume="allow",
            mode=self._mode,
            dir=self._run,
            project=self._project or names.project.replace("/", "-"),
            entity=self._entity,
            group=names.sweep,
            name=names.run,
            config={**names.config, "run_dir": str(self._run)},
            settings=settings,
            reinit="create_new",
        )
        self._tracked.define_metric(_STEP, hidden=True)
        self._tracked.define_metric("*", step_metric=_STEP)

    def _row(self, step: int, values: Mapping[str, Any]) -> None:
        # First noted, then sent: a kill between the two must not send it twice.
        self._log(json.dumps({"step": step, "keys": list(values)}))
        self._tracked.log({_STEP: step, **values}, step=self._rows, commit=True)
        self._rows += 1

    def _shown(self, name: str, value: Any) -> Any:
        library = self._library
        if isinstance(value, str):
            return library.Html(f"<pre>{html.escape(value)}</pre>", inject=False)
        if isinstance(value, Histogram):
            return library.Histogram(np_histogram=(value.counts, value.edges))
        if isinstance(value, PRCurve):
            points = zip(value.recall.tolist(), value.precision.tolist(), strict=True)
            table = library.Table(data=[list(p) for p in points], columns=["recall", "precision"])
            return library.plot.line(table, "recall", "precision", title=name)
        return library.Image(value)

    def _send_files(self) -> None:
        if not (files := self.files()):
            return
        artifact = self._library.Artifact(f"run-{self._tracked.id}", type="run")
        for path, entry in zip(files, listing(self._run, files), strict=True):
            if self._artifacts == "links":
                artifact.add_reference(entry["uri"], name=entry["path"], checksum=False)
            else:
                artifact.add_file(str(path), name=entry["path"], policy="immutable")
        self._tracked.log_artifact(artifact)

    def _log(self, line: str) -> None:
        log = AppendLog(self.place(".jsonl"))
        log.write(line)
        log.close()

    def _read_sent(self) -> None:
        place = self.place(".jsonl")
        lines = (
            place.read_text(encoding="utf-8").splitlines(keepends=True) if place.exists() else []
        )
        records = [json.loads(line) for line in lines if line.endswith("\n")]
        self._rows = len(records)
        for record in records:
            self.sent |= dict.fromkeys(record["keys"], int(record["step"]))

    def _forget_sent(self) -> None:
        self.sent, self._rows = {}, 0
        self.place(".jsonl").unlink(missing_ok=True)
