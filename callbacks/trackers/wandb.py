"""Send a run to Weights & Biases."""

import html
import importlib
import secrets
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from regimen.callbacks.support import require
from regimen.callbacks.trackers.recorder import Names, Tracker
from regimen.trainer.callback import Results
from regimen.trainer.media import Histogram, Media, PRCurve

_STEP = "global_step"  # the axis of all charts
_WAIT = 60.0  # seconds for what is not uploaded at the end


@dataclass(eq=False, kw_only=True)
class WandB(Tracker):
    """Send values, configuration, pictures and the run's files to Weights & Biases.

    `mode`: `offline` writes to `wandb/` of the run directory, which `wandb sync` uploads; `online`
    uploads while the run trains. `project`: None: the run's `name`; `entity`: a user or a team.
    `artifacts`: `links` makes an artifact of references to the files of the run directory, `files`
    one with the files, up to `max_megabytes` in all, the small ones first. Jobs of a sweep are one
    group.
    """

    mode: str = "offline"
    project: str | None = None
    entity: str | None = None
    package = "wandb"

    def __post_init__(self) -> None:
        super().__post_init__()
        require(
            self.mode in ("offline", "online"),
            f"mode={self.mode!r}: choose offline or online",
        )
        self._library: Any = None
        self._run: Any = None  # wandb's

    def connect(self, names: Names, tracked: Mapping[str, str]) -> tuple[dict[str, str], str]:
        """Go on with a run, or begin one."""
        if self._run is not None:
            return dict(tracked), ""
        self._library = importlib.import_module("wandb")
        settings = self._library.Settings(
            silent=True,
            console="off",  # train.log has what is printed
            disable_git=True,  # manifest.json has it
            finish_timeout=_WAIT,
            login_timeout=1.0,  # nobody is asked for a key
            x_disable_meta=True,
        )
        run = self._library.init(
            id=tracked.get("run_id") or secrets.token_hex(4),
            resume="allow",
            mode=self.mode,
            dir=self.run,
            project=self.project or names.project.replace("/", "-"),
            entity=self.entity,
            group=names.sweep,
            name=names.run,
            tags=names.tags,
            config={**names.config, "run_dir": str(self.run)},
            settings=settings,
            reinit="create_new",
        )
        self._run = run
        run.define_metric(_STEP, hidden=True)
        run.define_metric("*", step_metric=_STEP)
        run_id = str(run.id)
        if self.mode == "online":
            address = str(run.url)
        else:
            folder = shlex.quote(f"{self.run}/wandb")
            address = f"wandb sync {folder}/offline-run-*-{run_id}*"
        return {"run_id": run_id}, address

    def send(self, step: int, values: Mapping[str, float | Media]) -> None:
        """Send values at a step, or what is shown there."""
        converted = {name: self._converted(name, value) for name, value in values.items()}
        self._run.log({_STEP: step, **converted}, step=self.tracking["rows"], commit=True)

    def _converted(self, name: str, value: float | Media) -> Any:
        library = self._library
        if isinstance(value, float | int):
            return value
        if isinstance(value, str):
            return library.Html(f"<pre>{html.escape(value)}</pre>", inject=False)
        if isinstance(value, Histogram):
            return library.Histogram(np_histogram=(value.counts, value.edges))
        if isinstance(value, PRCurve):
            # Arrays of numpy, on the host.
            points = list(zip(value.recall.tolist(), value.precision.tolist(), strict=True))
            table = library.Table(data=points, columns=["recall", "precision"])
            return library.plot.line(table, "recall", "precision", title=name)
        return library.Image(value)

    def send_end(self, results: Results, files: Mapping[str, Path]) -> None:
        """Send the last values, the files of the run, and how it ended."""
        run = self._run
        run.summary.update({**results.metrics, "state": results.state})
        if files:
            artifact = self._library.Artifact(f"run-{run.id}", type="run")
            for place, path in files.items():
                if self.artifacts == "links":
                    artifact.add_reference(path.as_uri(), name=place, checksum=False)
                else:
                    artifact.add_file(str(path), name=place, policy="immutable")
            run.log_artifact(artifact)
        if results.state == "preempted":
            run.mark_preempting()
        exit_code = 0
        if results.state in ("preempted", "failed"):
            exit_code = results.code or 1
        run.finish(exit_code=exit_code)
