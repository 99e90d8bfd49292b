"""Write what is logged to TensorBoard; the x axis is the number of applied updates."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tensorboard.compat.proto.event_pb2 import Event  # type: ignore[import-untyped]

from callbacks.support.errors import CallbackError
from callbacks.support.event_file import EventFile, rewind
from callbacks.support.hparams import (
    columns,
    read_hparams,
    session_end,
    session_start,
)
from callbacks.support.settings import swept_keys
from callbacks.support.shown import Shown, Shows
from callbacks.support.summaries import layout_summary, shown_summary
from trainer.callback import Results, saver_of
from trainer.files.storage import storage_error
from trainer.runs.dashboard import FOLDER, command

if TYPE_CHECKING:
    from trainer.trainer import Trainer

_OPEN = ("preempted", "stopped")  # ends after which a run can go on
_log = logging.getLogger(__name__)


class TensorBoard(Shows):
    """Write all that is logged, and hyper-parameters, to `tensorboard/` in the run directory.

    `hparams`: globs over the dotted keys of the run's `config.yaml`; what a sweep varies and the
    matching settings are shown in the HParams tab, with the best value of the monitored metric and
    those of the test. The Custom Scalars tab has training and validation in one chart. A full disk
    causes a warning, and the run continues.
    """

    of_run = True

    def __init__(self, hparams: Sequence[str] = ()) -> None:
        if isinstance(hparams, str):  # a string is a Sequence as well
            raise CallbackError(f"hparams={hparams!r}: give a list of globs, such as [{hparams}]")
        self._hparams = hparams
        self._folder: Path | None = None
        self._file: EventFile | None = None
        self._sizes: dict[str, int] = {}  # of the files of earlier processes
        self._warned = False

    def on_fit_start(self, trainer: Trainer) -> None:
        """Start a file, and truncate those of a resumed run to their sizes in the checkpoint."""
        if trainer.run_dir is None or not trainer.is_main:
            return
        self._folder = trainer.run_dir / FOLDER
        self._try(lambda: self._begin(trainer))
        served = command(trainer.run_dir)
        _log.info("follow the run: %s", served, extra={"command": served})

    def on_log(self, trainer: Trainer, scalars: Mapping[str, float]) -> None:
        """Write scalars."""
        if self._file is not None:
            file = self._file
            self._try(lambda: file.scalars(trainer.log_point.step, scalars))

    def on_shown(self, trainer: Trainer, name: str, value: Shown) -> None:
        """Write an image, a histogram, a text or a curve."""
        if self._file is not None:
            file, summary = self._file, shown_summary(name, value)
            self._try(lambda: file.summary(trainer.log_point.step, summary))

    def write_graph(self, graph: bytes) -> None:
        """Write a model's graph, a serialized GraphDef."""
        if self._file is not None:
            file = self._file
            self._try(lambda: file.event(Event(graph_def=graph)))

    def on_run_end(self, trainer: Trainer, results: Results) -> None:
        """Close the session of the HParams tab; a run that can go on leaves it open."""
        there = self._folder is not None and self._folder.is_dir()  # or the run was discarded
        if self._file is not None and there and results.state not in _OPEN:
            file, end = self._file, session_end(failed=results.state == "failed")
            # A run that is resumed after all makes a running TensorBoard forget what is beyond.
            self._try(lambda: file.summary(trainer.state.global_step + 1, end))

    def state_dict(self) -> dict[str, Any]:
        """Return the files and their sizes."""
        own = {self._file.path.name: self._file.size} if self._file is not None else {}
        return {"sizes": {**self._sizes, **own}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what has been written."""
        self._sizes = dict(state["sizes"])

    def _begin(self, trainer: Trainer) -> None:
        assert self._folder is not None
        assert trainer.run_dir is not None
        rewind(self._folder, self._sizes)
        self._file = EventFile(self._folder, len(self._sizes))
        if trainer.resumed:
            self._file.purge(trainer.state.global_step + 1)
        self._file.summary(0, layout_summary(_charts(trainer.task.metric_names())))
        swept = swept_keys(trainer.run_dir)
        if hparams := read_hparams(trainer.run_dir, self._hparams, swept):
            self._file.summary(0, columns(hparams, swept, _outcomes(trainer)))
            self._file.summary(0, session_start(hparams))

    def _try(self, write: Callable[[], None]) -> None:
        try:
            write()
        except OSError as error:
            if not self._warned and self._folder is not None:
                self._warned = True
                path = self._file.path if self._file is not None else self._folder
                _log.warning("%s; training continues without it", storage_error(path, error))


def _charts(metrics: Sequence[str]) -> dict[str, list[str]]:
    """Return the tags of each chart: the loss comes first."""
    names = sorted(dict.fromkeys(metrics), key=lambda name: not name.startswith("loss"))
    return {n: [f"train/{n}", f"train/epoch_{n}", f"val/{n}", f"test/{n}"] for n in names}


def _outcomes(trainer: Trainer) -> list[str]:
    """Return the metrics that runs are compared by: the best value, and those of the test."""
    saver, metrics = saver_of(trainer.callbacks), trainer.task.metric_names()
    monitor = None if saver is None else saver.monitor
    best = [f"best/{monitor}"] if monitor else [f"val/{name}" for name in metrics]
    return [*best, *(f"test/{name}" for name in metrics)]
