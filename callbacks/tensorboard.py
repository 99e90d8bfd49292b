"""Write what is logged to TensorBoard; the x axis is the number of applied updates.

tensorboard's own writer passes records to a thread. When the disk is full that thread dies with a
traceback, and the next write raises its error. Here a record is one `write`, and a failed one
leaves the file unchanged. `SummaryWriter.add_hparams` writes to a separate sub-run, and accepts
neither lists nor None.
"""

import errno
import io
import os
import socket
import time
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from tensorboard.compat.proto.event_pb2 import Event, SessionLog  # type: ignore[import-untyped]
from tensorboard.compat.proto.summary_pb2 import Summary  # type: ignore[import-untyped]
from tensorboard.summary.writer.record_writer import RecordWriter  # type: ignore[import-untyped]
from torch.utils.tensorboard import summary as made

from regimen.callbacks.support import logger, require
from regimen.callbacks.trackers.recorder import UNFINISHED, Recorder, leaves, names_of
from regimen.trainer.callback import Histogram, Media, PRCurve, Results, saver_of
from regimen.trainer.runs.status import TENSORBOARD, command
from regimen.trainer.state import LogPoint
from regimen.trainer.trainer import Trainer

_SUFFIX = ".regimen"


class TensorBoard(Recorder):
    """Write all that is logged, and hyper-parameters, to `tensorboard/` in the run directory.

    The HParams tab shows what a sweep varies; for a run by itself what matches `hparams`, globs
    over the dotted keys of the run's `config.yaml`; and the best value of the monitored metric with
    those of the test. The Custom Scalars tab has training and validation in one chart. A full disk
    causes a warning, and the run continues.
    """

    persistent = ("sizes",)

    def __init__(self, hparams: Sequence[str] = ()) -> None:
        super().__init__()
        named = not isinstance(hparams, str)  # a string is a Sequence as well
        require(named, f"hparams={hparams!r}: give a list of globs, such as [{hparams}]")
        self._hparams = hparams
        self._path: Path | None = None
        self.sizes = dict[str, int]()  # of this file and those of earlier processes

    def begin(self, trainer: Trainer) -> None:
        """Start a file, and truncate those of a resumed run to their sizes in the checkpoint."""
        folder, number = self.run / TENSORBOARD, len(self.sizes)
        logger.info("follow the run: %s", command(self.run))
        for path in folder.glob(f"events.out.tfevents.*{_SUFFIX}"):
            if path.name not in self.sizes:
                path.unlink()
            elif path.stat().st_size > self.sizes[path.name]:
                os.truncate(path, self.sizes[path.name])
        folder.mkdir(parents=True, exist_ok=True)
        # TensorBoard reads the files of a folder in the order of their names.
        stamp = f"{int(time.time()):010d}.{socket.gethostname()}.{number}"
        self._path = folder / f"events.out.tfevents.{stamp}{_SUFFIX}"
        if trainer.resumed:  # a running TensorBoard drops what it has read from this step on
            start = SessionLog(status=SessionLog.START)
            self._write(step=trainer.state.global_step + 1, session_log=start)
        if number:  # TensorBoard keeps what the first file says of charts and settings
            return
        # A chart for each metric, the loss first: training and validation, as patterns.
        names = trainer.task.metric_names()
        ordered = sorted(dict.fromkeys(names), key=lambda name: not name.startswith("loss"))
        validated = [f"{stage}/" for stage in trainer.val_loaders] or ["val/"]
        stages = "train/", "train/epoch_", *validated, "test/"
        charts = {n: ["Multiline", [f"^{stage}{n}$" for stage in stages]] for n in ordered}
        self._write(summary=made.custom_scalars({"training and validation": charts}))  # type: ignore[no-untyped-call]
        run = names_of(self.run, trainer.config_text)
        if run.tags:
            self._write(step=0, summary=_summary("tags", ", ".join(run.tags)))
        settings = dict(leaves(run.config))
        chosen = {k for k in settings if any(fnmatchcase(k, p) for p in self._hparams)}
        # A group that is swept (`model`) has its override's value.
        shown = {k: settings.get(k, run.varied.get(k)) for k in run.varied or chosen}
        if any(value is not None for value in shown.values()):
            saver = saver_of(trainer.callbacks)
            monitor = None if saver is None else saver.monitor
            compared = (
                [f"best/{monitor}"] if monitor else [f"{validated[0]}{name}" for name in names]
            )
            metrics = dict.fromkeys([*compared, *(f"test/{name}" for name in names)], 0)
            for summary in made.hparams(shown, metrics)[:2]:  # type: ignore[no-untyped-call]
                self._write(summary=summary)  # the columns, and the run's row

    def record(self, at: LogPoint, values: Mapping[str, float]) -> None:
        """Write scalars."""
        pairs = [Summary.Value(tag=tag, simple_value=value) for tag, value in values.items()]
        self._write(step=at.step, summary=Summary(value=pairs))

    def show(self, step: int, name: str, value: Media) -> None:
        """Write an image, a histogram, a text or a curve."""
        self._write(step=step, summary=_summary(name, value))

    def write_graph(self, graph: bytes) -> None:
        """Write a model's graph, a serialized GraphDef."""
        self.attempt(lambda: self._write(graph_def=graph))

    def end(self, step: int, results: Results) -> None:
        """Mark a success in the HParams tab."""
        if results.state not in (*UNFINISHED, "failed"):
            # A run that is resumed after all makes a running TensorBoard forget what is beyond.
            self._write(step=step + 1, summary=made.hparams({}, {})[2])  # type: ignore[no-untyped-call]

    def _write(self, **event: Any) -> None:
        """Append an event completely, or raise OSError and leave the file unchanged.

        The file is opened for each record. There are few records, and no file is left open.
        """
        if self._path is None:
            return
        record, size = io.BytesIO(), self.sizes.get(self._path.name, 0)
        first = [] if size else [Event(file_version="brain.Event:2")]
        for part in (*first, Event(**event)):
            part.wall_time = time.time()
            RecordWriter(record).write(part.SerializeToString())
        content = record.getvalue()
        # Only the first record makes the file: under its name there may be another run's folder.
        make = 0 if size else os.O_CREAT
        descriptor = os.open(self._path, os.O_WRONLY | os.O_APPEND | make, 0o666)
        try:
            if os.write(descriptor, content) < len(content):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:
            os.ftruncate(descriptor, size)
            raise OSError(error.errno, error.strerror, str(self._path)) from error
        finally:
            os.close(descriptor)
        self.sizes[self._path.name] = size + len(content)


def _summary(name: str, value: Media) -> Summary:
    if isinstance(value, str):
        return made.text(name, value)  # type: ignore[no-untyped-call]
    if isinstance(value, Histogram):
        edges, counts = value.edges.tolist(), value.counts.tolist()
        sums = sum(counts), value.total, value.squares
        return made.histogram_raw(name, edges[0], edges[-1], *sums, edges[1:], counts)  # type: ignore[no-untyped-call]
    if isinstance(value, PRCurve):
        right = value.true_positives, value.false_positives
        wrong = value.true_negatives, value.false_negatives
        shares = value.precision, value.recall
        return made.pr_curve_raw(name, *right, *wrong, *shares, len(value.thresholds))  # type: ignore[no-untyped-call]
    return made.image(name, value, dataformats="HWC")  # type: ignore[no-untyped-call]
