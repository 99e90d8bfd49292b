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
from regimen.trainer.callback import Results, saver_of
from regimen.trainer.media import Histogram, Media, PRCurve
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
    affects_result = False

    def __init__(self, hparams: Sequence[str] = ()) -> None:
        super().__init__()
        require(
            not isinstance(hparams, str),  # a string is a Sequence as well
            f"hparams={hparams!r}: give a list of globs, such as [{hparams}]",
        )
        self._hparams = hparams
        self._path: Path | None = None
        self.sizes = dict[str, int]()  # of this file and those of earlier processes, in bytes

    def begin(self, trainer: Trainer) -> None:
        """Start a file, and truncate those of a resumed run to their sizes in the checkpoint."""
        folder = self.run / TENSORBOARD
        earlier_files = len(self.sizes)
        logger.info("follow the run: %s", command(self.run))
        self._truncate(folder)
        folder.mkdir(parents=True, exist_ok=True)
        # TensorBoard reads the files of a folder in the order of their names.
        stamp = f"{int(time.time()):010d}.{socket.gethostname()}.{earlier_files}"
        self._path = folder / f"events.out.tfevents.{stamp}{_SUFFIX}"
        if trainer.resumed:  # makes a running TensorBoard drop the values from this step on
            start = SessionLog(status=SessionLog.START)
            self._write(step=trainer.state.global_step + 1, session_log=start)
        if earlier_files == 0:  # TensorBoard takes charts and settings from the first file
            self._write_charts(trainer)
            self._write_settings(trainer)

    def _truncate(self, folder: Path) -> None:
        """Remove what was written after the checkpoint that the run goes on from."""
        for path in folder.glob(f"events.out.tfevents.*{_SUFFIX}"):
            size = self.sizes.get(path.name)
            if size is None:
                path.unlink()
            elif path.stat().st_size > size:
                os.truncate(path, size)

    def _write_charts(self, trainer: Trainer) -> None:
        """Write a chart for each metric, the loss first: training, validation and test in one."""
        names = dict.fromkeys(trainer.task.metric_names())
        losses_first = sorted(names, key=lambda name: not name.startswith("loss"))
        prefixes = ["train/", "train/epoch_", *_validation_prefixes(trainer), "test/"]
        charts = {}
        for name in losses_first:
            charts[name] = ["Multiline", [f"^{prefix}{name}$" for prefix in prefixes]]
        self._write(summary=made.custom_scalars({"training and validation": charts}))  # type: ignore[no-untyped-call]

    def _write_settings(self, trainer: Trainer) -> None:
        """Write the run's tags, and its row of the HParams tab if it has one."""
        run = names_of(self.run, trainer.config_text)
        if run.tags:
            self._write(step=0, summary=_summary("tags", ", ".join(run.tags)))
        settings = dict(leaves(run.config))
        if run.varied:
            # Where a group (`model`) is swept, its setting is a mapping: its override is shown.
            shown = {key: settings.get(key, text) for key, text in run.varied.items()}
        else:
            shown = {}
            for key, value in settings.items():
                if any(fnmatchcase(key, glob) for glob in self._hparams):
                    shown[key] = value
        if all(value is None for value in shown.values()):
            return
        metrics = dict.fromkeys(_compared_metrics(trainer), 0)
        columns, row, _ = made.hparams(shown, metrics)  # type: ignore[no-untyped-call]
        self._write(summary=columns)
        self._write(summary=row)

    def record(self, at: LogPoint, values: Mapping[str, float]) -> None:
        """Write scalars."""
        scalars = [Summary.Value(tag=tag, simple_value=value) for tag, value in values.items()]
        self._write(step=at.step, summary=Summary(value=scalars))

    def show(self, step: int, name: str, value: Media) -> None:
        """Write an image, a histogram, a text or a curve."""
        self._write(step=step, summary=_summary(name, value))

    def write_graph(self, graph: bytes) -> None:
        """Write a model's graph, a serialized GraphDef."""
        self.attempt(lambda: self._write(graph_def=graph))

    def end(self, step: int, results: Results) -> None:
        """Mark a success in the HParams tab."""
        if results.state not in (*UNFINISHED, "failed"):
            _, _, success = made.hparams({}, {})  # type: ignore[no-untyped-call]
            # At a step beyond the last: if the run is resumed after all, a running TensorBoard
            # drops it.
            self._write(step=step + 1, summary=success)

    def _write(self, **event: Any) -> None:
        """Append an event completely, or raise OSError and leave the file unchanged.

        The file is opened for each record. There are few records, and no file is left open.
        """
        path = self._path
        if path is None:
            return
        size = self.sizes.get(path.name, 0)
        content = io.BytesIO()
        if size == 0:
            _append_record(content, Event(file_version="brain.Event:2"))
        _append_record(content, Event(**event))
        record = content.getvalue()
        # Only the first record creates the file: if the run directory was replaced meanwhile, no
        # file must appear in another run's folder.
        flags = os.O_WRONLY | os.O_APPEND
        if size == 0:
            flags |= os.O_CREAT
        descriptor = os.open(path, flags, 0o666)
        try:
            if os.write(descriptor, record) < len(record):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:
            os.ftruncate(descriptor, size)
            raise OSError(error.errno, error.strerror, str(path)) from error
        finally:
            os.close(descriptor)
        self.sizes[path.name] = size + len(record)


def _append_record(content: io.BytesIO, event: Event) -> None:
    event.wall_time = time.time()
    RecordWriter(content).write(event.SerializeToString())


def _validation_prefixes(trainer: Trainer) -> list[str]:
    return [f"{stage}/" for stage in trainer.val_loaders] or ["val/"]


def _compared_metrics(trainer: Trainer) -> list[str]:
    """Return the columns of the HParams tab: the best value that is monitored, and the test's."""
    names = trainer.task.metric_names()
    test_metrics = [f"test/{name}" for name in names]
    saver = saver_of(trainer.callbacks)
    if saver is not None and saver.monitor:
        return [f"best/{saver.monitor}", *test_metrics]
    prefix = _validation_prefixes(trainer)[0]
    return [f"{prefix}{name}" for name in names] + test_metrics


def _summary(name: str, value: Media) -> Summary:
    if isinstance(value, str):
        return made.text(name, value)  # type: ignore[no-untyped-call]
    if isinstance(value, Histogram):
        edges = value.edges.tolist()
        counts = value.counts.tolist()
        return made.histogram_raw(  # type: ignore[no-untyped-call]
            name,
            min=edges[0],
            max=edges[-1],
            num=sum(counts),
            sum=value.total,
            sum_squares=value.squares,
            bucket_limits=edges[1:],
            bucket_counts=counts,
        )
    if isinstance(value, PRCurve):
        return made.pr_curve_raw(  # type: ignore[no-untyped-call]
            name,
            value.true_positives,
            value.false_positives,
            value.true_negatives,
            value.false_negatives,
            value.precision,
            value.recall,
            num_thresholds=len(value.thresholds),
        )
    return made.image(name, value, dataformats="HWC")  # type: ignore[no-untyped-call]
