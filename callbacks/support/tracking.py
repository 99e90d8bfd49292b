"""What callbacks share that send a run to a tracker: names, points sent once, and failures."""

from __future__ import annotations

import importlib.util
import logging
import os
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import yaml

from callbacks.support.errors import CallbackError
from callbacks.support.run_files import run_files, within
from callbacks.support.settings import read_overrides, swept_keys
from callbacks.support.shown import Shown, Shows
from trainer.callback import Results
from trainer.files.atomic import write_json
from trainer.rng import preserved
from trainer.runs.directory import CONFIG, OVERRIDES
from trainer.runs.metrics import read_metrics
from trainer.runs.status import RunDirectoryError, read_json
from trainer.state import LogPoint

if TYPE_CHECKING:
    from trainer.trainer import Trainer

FOLDER = "trackers"  # in the run directory: which tracked run it is
ARTIFACTS = ("links", "files", None)
UNFINISHED = ("preempted", "stopped")  # ends after which a run can go on
_KEPT = 10_000  # calls that wait for a tracker which is down; then the oldest are dropped
_PAUSE = 60.0  # seconds between two attempts to reach it
_TRIES = 2  # attempts for one of them
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Names:
    """How a run is called in a tracker."""

    project: str  # the configuration's `name`
    run: str  # its folder, or what varies in a job of a sweep
    sweep: str | None  # the same for all jobs of one
    config: Mapping[str, Any]

    @classmethod
    def of(cls, run: Path, config_text: str) -> Names:
        """Return the names of the run in a directory; its configuration is there or `text`."""
        file = run / CONFIG
        text = file.read_text(encoding="utf-8") if file.exists() else config_text
        config = yaml.safe_load(text) or {}
        project = str(config.get("name") or run.parent.name)
        if not (swept := swept_keys(run)):
            return cls(project, run.name, None, config)
        values = read_overrides(run / OVERRIDES)
        pairs = [f"{key.rpartition('.')[2]}={values[key]}" for key in swept if key in values]
        return cls(project, ",".join(pairs) or run.name, f"{project}/{run.parent.name}", config)


class Tracker(Shows):
    """Base class of callbacks that send a run to a tracker.

    Which tracked run it is stands in `trackers/<name>.json` of the run directory. A resumed run
    goes on with it: of each key only steps are sent that the tracker does not have, since a run
    repeats its values exactly. A run that goes back to an earlier step with other hyper-parameters
    begins another tracked run, since trackers take nothing back. A tracked run that begins in the
    middle of a run is given `metrics.jsonl` first.

    Whatever the tracker raises is one warning. Values that could not be sent wait, and are tried
    again once a minute and at the end. Only the main process sends.
    """

    of_run = True
    package = ""

    def __init__(self, artifacts: str | None, max_megabytes: float) -> None:
        if artifacts not in ARTIFACTS:
            raise CallbackError(f"artifacts={artifacts!r}: choose links, files or null")
        if max_megabytes <= 0:
            raise CallbackError(f"max_megabytes={max_megabytes}: choose a positive number")
        _require(self.package)
        self._artifacts = artifacts
        self._megabytes = max_megabytes
        self._run = Path()
        self._waiting: deque[Callable[[], None]] = deque()
        self._listens = self._connected = self._warned = False
        self._begin: Callable[[], None] | None = None
        self._retry_at = 0.0
        self._tries = 0
        self.sent: dict[str, int] = {}  # the last step of each key that the tracker has

    def key(self, name: str) -> str:
        """Return how the tracker spells a name."""
        return name

    def connect(self, names: Names, tracked: Mapping[str, Any]) -> bool:
        """Reach the tracker, go on with `tracked` (as remembered) or begin; return whether begun.

        Fills `sent` for a run that goes on.
        """
        raise NotImplementedError

    def begin_anew(self, names: Names) -> None:
        """Leave the tracked run, of which later steps are abandoned, and begin another."""
        raise NotImplementedError

    def send(self, step: int, values: Mapping[str, float]) -> None:
        """Send values at a step."""
        raise NotImplementedError

    def send_shown(self, step: int, name: str, value: Shown) -> None:
        """Send an image, a histogram, a text or a curve."""
        raise NotImplementedError

    def send_end(self, results: Results) -> None:
        """Send the run's last values and its files, and close the tracked run."""
        raise NotImplementedError

    def setup(self, trainer: Trainer) -> None:
        """Begin to listen."""
        if trainer.is_main and trainer.run_dir is not None:
            self._listens = True
            self._run = trainer.run_dir.absolute()

    def on_fit_start(self, trainer: Trainer) -> None:
        """Reach the tracker."""
        if self._listens:
            step, branches = trainer.state.global_step, trainer.branched
            text, resumed = trainer.config_text, trainer.resumed
            self._begin = lambda: self._reach(text, step, resumed, branches)
            self._flush()

    def on_log(self, trainer: Trainer, scalars: Mapping[str, float]) -> None:
        """Send values."""
        if self._listens:
            point, values = trainer.log_point, dict(scalars)
            if len(self._waiting) >= _KEPT:
                self._waiting.popleft()
            self._waiting.append(lambda: self._send(point, values))
            self._flush()

    def on_shown(self, trainer: Trainer, name: str, value: Shown) -> None:
        """Send an image, a histogram, a text or a curve."""
        # Pictures are large: none of them waits for a tracker that is down.
        if not self._listens or self._retry_at > time.monotonic():
            return
        step = trainer.log_point.step

        def show() -> None:
            if step > self.sent.get(name, -1):
                self.send_shown(step, name, value)
                self.sent[name] = step

        self._waiting.append(show)
        self._flush()

    def on_run_end(self, trainer: Trainer, results: Results) -> None:
        """Send what waits, and how the run ended."""
        if self._begin is not None and self._run.is_dir():  # or the run was discarded
            self._waiting.append(lambda: self.send_end(results))
            attempts = 1 if results.state == "preempted" else _TRIES + 1
            while self._waiting and attempts:
                attempts -= 1
                self._retry_at = 0.0
                self._flush()

    def remember(self, tracked: Mapping[str, Any]) -> None:
        """Write down which tracked run this is. Raises StorageError."""
        place = self.place(".json")
        place.parent.mkdir(exist_ok=True)
        write_json(place, dict(tracked))

    def files(self) -> list[Path]:
        """Return the files of the run directory that the tracker is given, small ones first."""
        if self._artifacts is None:
            return []
        files = run_files(self._run)
        if self._artifacts == "links":
            return files
        files, left = within(files, self._megabytes)
        if left:
            text = "callbacks.%s: max_megabytes=%g leaves out %d files: %s"
            names = ", ".join(str(path.relative_to(self._run)) for path in left[:3])
            _log.info(text, self.name, self._megabytes, len(left), names)
        return files

    def place(self, ending: str) -> Path:
        """Return the path of a file of this callback's in the run directory."""
        return self._run / FOLDER / f"{self.name}{ending}"

    def _reach(self, text: str, step: int, resumed: bool, branches: bool) -> None:
        names = Names.of(self._run, text)
        begun = self.connect(names, _read(self.place(".json")))
        if branches and max(self.sent.values(), default=0) > step:
            self.sent = {}
            self.begin_anew(names)
            begun = True
        self._connected = True
        if resumed:  # also what waited when the process before this one was killed
            lines = [line for line in _logged(self._run) if line[0].step <= step]
            self._waiting.extendleft(partial(self._send, *line) for line in reversed(lines))
        if begun:
            _log.info("callbacks.%s: %s", self.name, self.address())

    def address(self) -> str:
        """Return where a person finds the tracked run."""
        raise NotImplementedError

    def _send(self, at: LogPoint, values: Mapping[str, float]) -> None:
        all_values = {"epoch": float(at.epoch)} | {self.key(k): v for k, v in values.items()}
        fresh = {k: v for k, v in all_values.items() if at.step > self.sent.get(k, -1)}
        if fresh.keys() - {"epoch"}:
            self.send(at.step, fresh)
            self.sent |= dict.fromkeys(fresh, at.step)

    def _flush(self) -> None:
        """Send what waits, in order, unless the tracker failed a moment ago."""
        if self._begin is None or time.monotonic() < self._retry_at:
            return
        try:
            with preserved(torch.device("cpu")):  # MLflow draws from `random`
                if not self._connected:
                    self._begin()
                while self._waiting:
                    self._waiting[0]()
                    self._waiting.popleft()
                    self._tries = 0
        except Exception as error:  # a tracker may raise anything, and the run goes on
            self._fail(error)

    def _fail(self, error: Exception) -> None:
        self._retry_at = time.monotonic() + _PAUSE
        self._tries += 1
        if self._tries >= _TRIES and self._connected and self._waiting:
            self._waiting.popleft()  # it may be what the tracker does not take
            self._tries = 0
        if not self._warned:
            self._warned = True
            reason = str(error).strip().partition("\n")[0] or type(error).__name__
            _log.warning("callbacks.%s: %s; training continues without it", self.name, reason)


@contextmanager
def environment(**defaults: str) -> Iterator[None]:
    """Set variables that are not set, for the libraries that read them, while in the context."""
    missing = {key: value for key, value in defaults.items() if key not in os.environ}
    os.environ.update(missing)
    try:
        yield
    finally:
        for key in missing:
            os.environ.pop(key, None)


def _require(package: str) -> None:
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:  # a folder of that name is no package
        raise CallbackError(f"the package {package} is not installed: pip install {package}")


def _logged(run: Path) -> Iterator[tuple[LogPoint, dict[str, float]]]:
    for line in read_metrics(run):
        at = LogPoint(int(line.pop("step")), int(line.pop("epoch")))
        yield at, {key: value for key, value in line.items() if value is not None}


def _read(path: Path) -> dict[str, Any]:
    try:
        return read_json(path)
    except RunDirectoryError as error:
        _log.warning("%s: another tracked run begins", error)
        return {}
