"""What records a run: values, what is shown beside them, and its end; and trackers of others."""

import importlib.util
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from regimen.callbacks.support import logger, require
from regimen.conf.yaml_file import plain_values
from regimen.trainer.callback import Callback, Histogram, Media, PRCurve, Results
from regimen.trainer.files.atomic import TEMPORARY, storage_error, write_json
from regimen.trainer.files.layout import as_csv, encodable
from regimen.trainer.runs.directory import CONFIG, OVERRIDES
from regimen.trainer.runs.lock import LOCK_FILE
from regimen.trainer.runs.metrics_log import MetricsLog as MetricsLog
from regimen.trainer.runs.status import SWEEP, read_json, read_metrics, read_own
from regimen.trainer.state import LogPoint
from regimen.trainer.trainer import Trainer

UNFINISHED = ("preempted", "stopped")  # ends after which a run can go on
FOLDER = "trackers"  # in the run directory
Value = bool | int | float | str
_PAUSE = 60.0  # seconds until a tracker that was down is tried again


class Recorder(Callback):
    """Base class of callbacks that record a run; on the main process, where it has a directory.

    Whatever fails is one warning, and the run goes on.
    """

    of_run = True

    def __init__(self) -> None:
        self.run = Path()  # the run directory
        self._records = False  # whether the run is recorded, and here
        self._warned = False

    def begin(self, trainer: Trainer) -> None:
        """Begin, or go on with what a resumed run has recorded up to its checkpoint."""

    def record(self, at: LogPoint, values: Mapping[str, float]) -> None:
        """Record values."""

    def show(self, step: int, name: str, value: Media) -> None:
        """Record an image, a histogram, a text or a curve."""

    def end(self, step: int, results: Results) -> None:
        """Record how the run ended, at its last step."""

    def on_fit_start(self, trainer: Trainer) -> None:
        """Begin."""
        if trainer.is_main and trainer.run_dir is not None:
            self.run, self._records = trainer.run_dir.absolute(), True
            self.attempt(self.begin, trainer)

    def on_log(self, trainer: Trainer, scalars: Mapping[str, float]) -> None:
        """Record values."""
        values = {encodable(name): value for name, value in scalars.items()}
        self.attempt(self.record, trainer.log_point, values)

    def on_media(self, trainer: Trainer, name: str, media: Media) -> None:
        """Record an image, a histogram, a text or a curve."""
        shown = encodable(media) if isinstance(media, str) else media
        self.attempt(self.show, trainer.log_point.step, encodable(name), shown)

    def on_run_end(self, trainer: Trainer, results: Results) -> None:
        """Record the end, unless the run was discarded."""
        if self.run.is_dir():
            self.attempt(self.end, trainer.state.global_step, results)

    def attempt(self, work: Callable[..., None], *args: Any) -> None:
        """Do something that may fail, if the run is recorded."""
        try:
            if self._records:
                work(*args)
        except Exception as error:  # a tracker may raise anything
            self.failed(error)

    def failed(self, error: Exception) -> None:
        """Warn of the first failure."""
        if self._warned:
            return
        self._warned, told = True, error
        if isinstance(error, OSError) and error.filename:
            told = storage_error(Path(error.filename), error)
        reason = str(told).strip().partition("\n")[0] or type(error).__name__
        logger.warning("callbacks.%s: %s; training continues without it", self.name, reason)


@dataclass(eq=False, kw_only=True)
class Tracker(Recorder):
    """Base class of callbacks that send a run to a tracker.

    Which tracked run it is, and the last step of each key that it has, stand in
    `trackers/<name>.json` of the run directory. A resumed run goes on with it: of each key only
    later steps are sent, since a run repeats its values exactly. What the tracker has missed is
    read from `metrics.jsonl`. A run that goes back to an earlier step with other hyper-parameters
    begins another tracked run, since trackers take nothing back. One that fails is left alone for
    a minute, then reached anew.
    """

    artifacts: str | None = "links"
    max_megabytes: float = 100.0
    package = ""

    def __post_init__(self) -> None:
        super().__init__()
        known = self.artifacts in ("links", "files", None)
        require(known, f"artifacts={self.artifacts!r}: choose links, files or null")
        bound = f"max_megabytes={self.max_megabytes}: choose a positive number"
        require(self.max_megabytes > 0, bound)
        spec = importlib.util.find_spec(self.package)
        there = spec is not None and spec.origin is not None  # a folder of that name is no package
        missing = f"the package {self.package} is not installed: pip install {self.package}"
        require(there, missing)
        self._names: Names
        self.known = dict[str, Any]()  # what is written down: tracked, sent, rows (sendings)
        self._reached, self._retry_at = False, 0.0

    def connect(self, names: "Names", tracked: Mapping[str, str]) -> tuple[dict[str, str], str]:
        """Go on with the tracked run that `tracked` names, or begin one.

        Return what names it, and where a person finds it.
        """
        raise NotImplementedError

    def send(self, step: int, values: Mapping[str, float | Media]) -> None:
        """Send values at a step, or what is shown there."""

    def send_end(self, results: Results, files: Mapping[str, Path]) -> None:
        """Send the run's last values and files, by their places, and close the tracked run."""

    def begin(self, trainer: Trainer) -> None:
        """Reach the tracker, and send what it has missed."""
        self._names = names_of(self.run, trainer.config_text)
        self.known = read_json(self.run / FOLDER / f"{self.name}.json")
        if not isinstance(self.known.get("sent", {}), dict):
            self.known = {}
        last = max(self.known.get("sent", {}).values(), default=0)
        if trainer.branched and last > trainer.state.global_step:
            self.known = {}
        self._reach()

    def record(self, at: LogPoint, values: Mapping[str, float]) -> None:
        """Send values."""
        if self._reach():
            self._send(at.step, {"epoch": float(at.epoch), **values})

    def show(self, step: int, name: str, value: Media) -> None:
        """Send an image, a histogram, a text or a curve; of these none is sent later."""
        if self._reach():
            self._send(step, {name: value})

    def end(self, step: int, results: Results) -> None:
        """Send how the run ended, and what is missing until then."""
        self._retry_at = 0.0
        self._reach()
        whole = self.artifacts and results.state not in UNFINISHED
        self.send_end(results, self.files() if whole else {})

    def failed(self, error: Exception) -> None:
        """Warn of the first failure, and pause."""
        super().failed(error)
        self._reached, self._retry_at = False, time.monotonic() + _PAUSE

    def files(self) -> dict[str, Path]:
        """Return the files of the run directory for the tracker, by their places in it.

        The small ones come first; of several names of one file the first. Left out are what
        trackers keep there, locks and files that are being written.
        """
        inodes = dict[int, tuple[int, str]]()
        for path in sorted(self.run.rglob("*")):
            place = path.relative_to(self.run).as_posix()
            own = place.startswith((f"{FOLDER}/", "wandb/"))
            own = own or path.name.startswith((LOCK_FILE, TEMPORARY))
            if path.is_file() and not path.is_symlink() and not own:
                inodes.setdefault(path.stat().st_ino, (path.stat().st_size, place))
        taken, left = {}, self.max_megabytes * 1e6
        for size, place in sorted(inodes.values()):
            if self.artifacts == "links" or size <= left:
                taken[place] = self.run / place
                left -= size
        if missing := len(inodes) - len(taken):
            text = "callbacks.%s: max_megabytes=%g leaves out %d files"
            logger.info(text, self.name, self.max_megabytes, missing)
        return taken

    def _reach(self) -> bool:
        """Connect unless it is connected or was down a moment ago; return whether it is."""
        if not self._reached and time.monotonic() >= self._retry_at:
            before = self.known.get("tracked", {})
            tracked, address = self.connect(self._names, before)
            if tracked != before:
                self.known = {"tracked": tracked, "rows": 0, "sent": {}}
                logger.info("callbacks.%s: %s", self.name, address)
            self._reached = True
            for line in read_metrics(self.run):
                values = {k: float(v) for k, v in line.items() if k != "step" and v is not None}
                self._send(int(line["step"]), values)
        return self._reached

    def _send(self, step: int, values: Mapping[str, float | Media]) -> None:
        """Send what is new, and write it down."""
        sent = self.known["sent"]
        fresh = {k: v for k, v in values.items() if step > sent.get(k, -1)}
        if fresh.keys() - {"epoch"}:
            self.send(step, fresh)
            sent |= dict.fromkeys(fresh, step)
            self.known["rows"] += 1
            (self.run / FOLDER).mkdir(exist_ok=True)
            write_json(self.run / FOLDER / f"{self.name}.json", self.known)


class Names(NamedTuple):
    """How a run is called in a tracker, its configuration, and what varies in its sweep."""

    tags: list[str]
    project: str  # the configuration's `name`
    run: str  # its folder, or what varies in a job of a sweep
    sweep: str | None  # the same for all jobs of one
    config: dict[str, Any]
    varied: dict[str, str | None]  # with the values as the run's overrides say


def names_of(run: Path, config_text: str) -> Names:
    """Return the names of the run in a directory; without a `config.yaml` by `config_text`."""
    file, keys = run / CONFIG, read_json(run.parent / SWEEP).get("swept")
    if not isinstance(keys, list):
        keys = []
    config = read_own(file) if file.exists() else plain_values(config_text, "its configuration")
    texts = read_own(run / OVERRIDES) if keys else []
    given = dict(str(text).lstrip("+~").partition("=")[::2] for text in texts)
    varied = {key: given.get(key) for key in keys}
    project = str(config.get("name") or run.parent.name)
    pairs = [f"{k.rpartition('.')[2]}={value}" for k, value in varied.items() if value is not None]
    sweep = f"{project}/{run.parent.name}" if varied else None
    tags = list(map(str, config.get("tags") or []))
    return Names(tags, project, ",".join(pairs) or run.name, sweep, config, varied)


def leaves(node: Any, prefix: str = "") -> Iterator[tuple[str, Value | None]]:
    """Yield the values of a nested mapping by their dotted keys; a list is one text."""
    if isinstance(node, dict):
        for key, child in node.items():
            yield from leaves(child, f"{prefix}.{key}" if prefix else str(key))
    else:
        yield prefix, str(node) if isinstance(node, list) else node


def as_text(value: Histogram | PRCurve | str) -> tuple[str, str]:
    """Return the ending and the content of the file that shows something, but an image."""
    if isinstance(value, str):
        return "md", value
    if isinstance(value, PRCurve):
        rows = zip(value.thresholds, value.precision, value.recall, strict=True)
        return "csv", as_csv([("threshold", "precision", "recall"), *rows])
    rows = zip(value.edges[:-1], value.edges[1:], value.counts, strict=True)
    return "csv", as_csv([("left", "right", "count"), *rows])
