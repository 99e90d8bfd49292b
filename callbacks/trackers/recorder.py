"""Base classes of callbacks that record a run in files, or send it to a tracker."""

import importlib.util
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from regimen.callbacks.support import logger, require
from regimen.conf.interpolation import children
from regimen.conf.yaml_file import plain_values
from regimen.trainer.callback import Callback, Results
from regimen.trainer.files.atomic import TEMPORARY, storage_error, write_json
from regimen.trainer.files.layout import as_csv, encodable
from regimen.trainer.media import Histogram, Media, PRCurve
from regimen.trainer.runs.directory import CONFIG, OVERRIDES
from regimen.trainer.runs.lock import LOCK_FILE
from regimen.trainer.runs.metrics_log import MetricsLog as MetricsLog
from regimen.trainer.runs.status import SWEEP, read_json, read_metrics, read_run_yaml
from regimen.trainer.state import LogPoint
from regimen.trainer.trainer import Trainer

UNFINISHED = ("preempted", "stopped")  # ends after which a run can go on
FOLDER = "trackers"  # in the run directory
Value = bool | int | float | str
_PAUSE = 60.0  # seconds until a tracker that was down is tried again


class Recorder(Callback):
    """Base class of callbacks that record a run, on the main process, if it has a directory.

    The first failure is a warning, later ones are silent, and the training goes on.
    """

    of_run = True

    def __init__(self) -> None:
        self.run = Path()  # the run directory
        self._is_active = False  # whether the run has a directory, and this process records it
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
            self.run = trainer.run_dir.absolute()
            self._is_active = True
            self.attempt(self.begin, trainer)

    def on_log(self, trainer: Trainer, scalars: Mapping[str, float]) -> None:
        """Record values."""
        values = {encodable(name): value for name, value in scalars.items()}
        self.attempt(self.record, trainer.log_point, values)

    def on_media(self, trainer: Trainer, name: str, media: Media) -> None:
        """Record an image, a histogram, a text or a curve."""
        if isinstance(media, str):
            media = encodable(media)
        self.attempt(self.show, trainer.log_point.step, encodable(name), media)

    def on_run_end(self, trainer: Trainer, results: Results) -> None:
        """Record the end, unless the run was discarded."""
        if self.run.is_dir():
            self.attempt(self.end, trainer.state.global_step, results)

    def attempt(self, work: Callable[..., None], *args: Any) -> None:
        """Do something that may fail, if the run is recorded."""
        if not self._is_active:
            return
        try:
            work(*args)
        except Exception as error:  # a tracker may raise anything
            self.failed(error)

    def failed(self, error: Exception) -> None:
        """Warn of the first failure."""
        if self._warned:
            return
        self._warned = True
        if isinstance(error, OSError) and error.filename:
            error = storage_error(Path(error.filename), error)
        first_line = str(error).strip().partition("\n")[0]
        logger.warning(
            "callbacks.%s: %s; training continues without it",
            self.name,
            first_line or type(error).__name__,
        )


@dataclass(eq=False, kw_only=True)
class Tracker(Recorder):
    """Base class of callbacks that send a run to a tracker.

    `trackers/<name>.json` in the run directory holds the id of the tracked run, and the last step
    that was sent of each key. A resumed run continues the tracked run, and sends only later steps
    of each key, since it repeats the values of earlier ones exactly. Values that were not sent
    while the tracker was down are read from `metrics.jsonl`. A run that goes back to an earlier
    step with other hyper-parameters begins another tracked run, since trackers delete nothing.
    After a failure the tracker is left alone for a minute, then connected again.
    """

    artifacts: str | None = "links"
    max_megabytes: float = 100.0
    package = ""
    affects_result = False

    def __post_init__(self) -> None:
        super().__init__()
        require(
            self.artifacts in ("links", "files", None),
            f"artifacts={self.artifacts!r}: choose links, files or null",
        )
        require(
            self.max_megabytes > 0,
            f"max_megabytes={self.max_megabytes}: choose a positive number",
        )
        spec = importlib.util.find_spec(self.package)
        require(
            spec is not None and spec.origin is not None,  # a mere folder of that name has none
            f"the package {self.package} is not installed: pip install {self.package}",
        )
        self._names: Names
        # The content of `trackers/<name>.json`: `tracked` (what names the tracked run), `sent` (the
        # last step by key) and `rows` (the number of sendings).
        self.tracking = dict[str, Any]()
        self._connected = False
        self._retry_at = 0.0

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
        """Connect to the tracker, and send what it has missed."""
        self._names = names_of(self.run, trainer.config_text)
        tracking = read_json(self._file())
        sent = tracking.get("sent", {})
        if not isinstance(sent, dict):  # the file is damaged
            tracking = {}
            sent = {}
        last_step = max(sent.values(), default=0)
        if trainer.branched and last_step > trainer.state.global_step:
            tracking = {}
        self.tracking = tracking
        self._connect()

    def _file(self) -> Path:
        return self.run / FOLDER / f"{self.name}.json"

    def record(self, at: LogPoint, values: Mapping[str, float]) -> None:
        """Send values."""
        if self._connect():
            self._send(at.step, {"epoch": float(at.epoch), **values})

    def show(self, step: int, name: str, value: Media) -> None:
        """Send an image, a histogram, a text or a curve; what is missed is not sent later."""
        if self._connect():
            self._send(step, {name: value})

    def end(self, step: int, results: Results) -> None:
        """Send how the run ended, and what is missing until then."""
        self._retry_at = 0.0
        self._connect()
        files = {}
        if self.artifacts and results.state not in UNFINISHED:
            files = self.files()
        self.send_end(results, files)

    def failed(self, error: Exception) -> None:
        """Warn of the first failure, and pause."""
        super().failed(error)
        self._connected = False
        self._retry_at = time.monotonic() + _PAUSE

    def files(self) -> dict[str, Path]:
        """Return the files of the run directory for the tracker, by their places in it.

        The small ones come first. A file with several names (hard links) has the first of them.
        The folders of trackers, locks and files that are being written are left out.
        """
        inodes = dict[int, tuple[int, str]]()  # size and place of a file
        for path in sorted(self.run.rglob("*")):
            place = path.relative_to(self.run).as_posix()
            if place.startswith((f"{FOLDER}/", "wandb/")):
                continue
            if path.name.startswith((LOCK_FILE, TEMPORARY)):
                continue
            if path.is_file() and not path.is_symlink():
                status = path.stat()
                inodes.setdefault(status.st_ino, (status.st_size, place))

        chosen = {}
        bytes_left = self.max_megabytes * 1e6
        for size, place in sorted(inodes.values()):
            if self.artifacts == "links" or size <= bytes_left:
                chosen[place] = self.run / place
                bytes_left -= size
        if len(chosen) < len(inodes):
            logger.info(
                "callbacks.%s: max_megabytes=%g leaves out %d files",
                self.name,
                self.max_megabytes,
                len(inodes) - len(chosen),
            )
        return chosen

    def _connect(self) -> bool:
        """Connect unless it is connected or was down a moment ago; return whether it is."""
        if self._connected or time.monotonic() < self._retry_at:
            return self._connected
        before = self.tracking.get("tracked", {})
        tracked, address = self.connect(self._names, before)
        if tracked != before:
            self.tracking = {"tracked": tracked, "rows": 0, "sent": {}}
            logger.info("callbacks.%s: %s", self.name, address)
        self._connected = True
        for line in read_metrics(self.run):
            values = {k: float(v) for k, v in line.items() if k != "step" and v is not None}
            self._send(int(line["step"]), values)
        return True

    def _send(self, step: int, values: Mapping[str, float | Media]) -> None:
        """Send what is new, and write it down."""
        tracking = self.tracking
        sent = tracking["sent"]
        new = {key: value for key, value in values.items() if step > sent.get(key, -1)}
        if not new.keys() - {"epoch"}:
            return
        self.send(step, new)
        sent |= dict.fromkeys(new, step)
        tracking["rows"] += 1
        file = self._file()
        file.parent.mkdir(exist_ok=True)
        write_json(file, tracking)


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
    config_file = run / CONFIG
    if config_file.exists():
        config = read_run_yaml(config_file)
    else:
        config = plain_values(config_text, "its configuration")
    project = str(config.get("name") or run.parent.name)
    tags = [str(tag) for tag in config.get("tags") or []]

    varied = _varied(run)
    sweep = None
    if varied:
        sweep = f"{project}/{run.parent.name}"
    terms = []
    for key, value in varied.items():
        if value is not None:
            terms.append(f"{key.rpartition('.')[2]}={value}")
    return Names(tags, project, ",".join(terms) or run.name, sweep, config, varied)


def _varied(run: Path) -> dict[str, str | None]:
    """Return the keys that the sweep of a job varies, with the job's overrides of them."""
    keys = read_json(run.parent / SWEEP).get("swept")
    if not isinstance(keys, list) or not keys:
        return {}
    overrides = dict[str, str]()
    for text in read_run_yaml(run / OVERRIDES):
        key, _, value = str(text).lstrip("+~").partition("=")
        overrides[key] = value
    return {key: overrides.get(key) for key in keys}


def leaves(node: Any, key: str = "") -> Iterator[tuple[str, Value | None]]:
    """Yield the values of a nested mapping by their dotted keys; a list is one text.

    Unlike `regimen.conf.interpolation.leaves`, which yields the entries of lists.
    """
    if isinstance(node, dict):
        for inner_key, child in children(node, key):
            yield from leaves(child, inner_key)
    elif isinstance(node, list):
        yield key, str(node)
    else:
        yield key, node


def as_text(value: Histogram | PRCurve | str) -> tuple[str, str]:
    """Return the ending and the content of the file that shows something, but an image."""
    if isinstance(value, str):
        return "md", value
    if isinstance(value, PRCurve):
        points = zip(value.thresholds, value.precision, value.recall, strict=True)
        return "csv", as_csv([("threshold", "precision", "recall"), *points])
    bins = zip(value.edges[:-1], value.edges[1:], value.counts, strict=True)
    return "csv", as_csv([("left", "right", "count"), *bins])
