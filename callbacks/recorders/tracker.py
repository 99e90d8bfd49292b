"""What callbacks share that send a run to a tracker of others."""

import importlib.util
import logging
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from callbacks.recorders.recorder import Recorder
from callbacks.recorders.settings import Names
from callbacks.support.errors import CallbackError
from trainer.callback import Results
from trainer.files.atomic import TEMPORARY, write_json
from trainer.media import Media
from trainer.runs.lock import LOCK_FILE
from trainer.runs.status import RunDirectoryError, read_json, read_metrics
from trainer.state import LogPoint
from trainer.trainer import Trainer

FOLDER = "trackers"  # in the run directory
_PAUSE = 60.0  # seconds until a tracker that was down is tried again
_log = logging.getLogger(__name__)


class Tracker(Recorder):
    """Base class of callbacks that send a run to a tracker.

    Which tracked run it is, and the last step of each key that it has, stand in
    `trackers/<name>.json` of the run directory. A resumed run goes on with it: of each key only
    later steps are sent, since a run repeats its values exactly. What the tracker has missed is
    read from `metrics.jsonl`. A run that goes back to an earlier step with other hyper-parameters
    begins another tracked run, since trackers take nothing back.
    """

    package = ""

    def __init__(self, artifacts: str | None, max_megabytes: float) -> None:
        super().__init__()
        if artifacts not in ("links", "files", None):
            raise CallbackError(f"artifacts={artifacts!r}: choose links, files or null")
        if max_megabytes <= 0:
            raise CallbackError(f"max_megabytes={max_megabytes}: choose a positive number")
        spec = importlib.util.find_spec(self.package)
        if spec is None or spec.origin is None:  # a folder of that name is no package
            missing = f"the package {self.package} is not installed: pip install {self.package}"
            raise CallbackError(missing)
        self.artifacts = artifacts
        self._megabytes = max_megabytes
        self._branch: int | None = None  # the step from which a branched run has other values
        self._reached = False
        self._retry_at = 0.0
        self._tracked: Mapping[str, str] = {}
        self._sent: dict[str, int] = {}
        self.rows = 0  # sent by all processes of the run

    def connect(self, names: Names, tracked: Mapping[str, str]) -> dict[str, str]:
        """Go on with the tracked run that `tracked` names, or begin one; return what names it."""
        raise NotImplementedError

    def address(self) -> str:
        """Return where a person finds the tracked run."""
        raise NotImplementedError

    def send(self, step: int, values: Mapping[str, float]) -> None:
        """Send values at a step."""
        raise NotImplementedError

    def send_media(self, step: int, name: str, media: Media) -> None:
        """Send an image, a histogram, a text or a curve."""
        raise NotImplementedError

    def send_end(self, results: Results) -> None:
        """Send the run's last values and its files, and close the tracked run."""
        raise NotImplementedError

    def begin(self, trainer: Trainer) -> None:
        """Reach the tracker, and send what it has missed."""
        self._branch = trainer.state.global_step if trainer.branched else None
        self._reach(trainer)

    def record(self, trainer: Trainer, at: LogPoint, values: Mapping[str, float]) -> None:
        """Send values."""
        if self._reach(trainer):
            self._send_values(at, values)

    def show(self, trainer: Trainer, at: LogPoint, name: str, media: Media) -> None:
        """Send an image, a histogram, a text or a curve; of these none is sent later."""
        if self._reach(trainer) and at.step > self._sent.get(name, -1):
            self._note(at.step, [name], lambda: self.send_media(at.step, name, media))

    def end(self, trainer: Trainer, results: Results) -> None:
        """Send how the run ended, and what is missing until then."""
        self._retry_at = 0.0
        self._reach(trainer)
        self.send_end(results)

    def attempt(self, work: Callable[[], None]) -> bool:
        """Send something; a tracker that fails is left alone for a minute, then reached anew."""
        if not (done := super().attempt(work)):
            self._reached, self._retry_at = False, time.monotonic() + _PAUSE
        return done

    def files(self) -> dict[str, Path]:
        """Return the files of the run directory for the tracker, by their places in it.

        The small ones come first; of several names of one file the first. Left out are what
        trackers keep there, locks and files that are being written.
        """
        assert self.run is not None
        inodes: dict[int, tuple[int, str]] = {}
        for path in sorted(path for path in self.run.rglob("*") if path.is_file()):
            place, status = str(path.relative_to(self.run)), path.stat()
            own = place.startswith((f"{FOLDER}/", "wandb/")) or path.name == LOCK_FILE
            if not (own or path.name.startswith(TEMPORARY) or path.is_symlink()):
                inodes.setdefault(status.st_ino, (status.st_size, place))
        taken, left = {}, self._megabytes * 1e6
        for size, place in sorted(inodes.values()):
            if self.artifacts == "links" or size <= left:
                taken[place] = self.run / place
                left -= size
        if len(taken) < len(inodes):
            text = "callbacks.%s: max_megabytes=%g leaves out %d files"
            _log.info(text, self.name, self._megabytes, len(inodes) - len(taken))
        return taken

    def _place(self) -> Path:
        assert self.run is not None
        return self.run / FOLDER / f"{self.name}.json"

    def _reach(self, trainer: Trainer) -> bool:
        """Connect unless it is connected or was down a moment ago; return whether it is."""
        assert self.run is not None
        if self._reached or time.monotonic() < self._retry_at:
            return self._reached
        try:
            known = read_json(self._place())
        except RunDirectoryError as error:
            _log.warning("%s: another tracked run begins", error)
            known = {}
        names = Names.of(self.run, trainer.config_text)
        tracked, sent = known.get("tracked", {}), known.get("sent", {})
        if self._branch is not None and max(sent.values(), default=0) > self._branch:
            tracked = {}
        self._tracked = self.connect(names, tracked)
        self._reached, self._branch = True, None
        if self._tracked == tracked:
            self._sent, self.rows = sent, known["rows"]
        else:
            self._sent, self.rows = {}, 0
            self._remember()
            _log.info("callbacks.%s: %s", self.name, self.address())
        for line in read_metrics(self.run):
            at = LogPoint(int(line.pop("step")), int(line.pop("epoch")))
            if at.step <= trainer.state.global_step:
                self._send_values(at, {k: v for k, v in line.items() if v is not None})
        return True

    def _send_values(self, at: LogPoint, values: Mapping[str, float]) -> None:
        every = {"epoch": float(at.epoch), **values}
        fresh = {k: v for k, v in every.items() if at.step > self._sent.get(k, -1)}
        if fresh.keys() - {"epoch"}:
            self._note(at.step, fresh, lambda: self.send(at.step, fresh))

    def _note(self, step: int, names: Iterable[str], send: Callable[[], None]) -> None:
        """Write down what is sent, and send it: a kill between the two must not repeat it."""
        before = self._sent
        self._sent = {**before, **dict.fromkeys(names, step)}
        self._remember()
        try:
            send()
        except Exception:
            self._sent = before
            self._remember()
            raise
        self.rows += 1

    def _remember(self) -> None:
        self._place().parent.mkdir(exist_ok=True)
        facts = {"tracked": self._tracked, "rows": self.rows + 1, "sent": self._sent}
        write_json(self._place(), facts)
