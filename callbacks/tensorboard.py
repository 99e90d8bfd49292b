"""Write what is logged to TensorBoard; the x axis is the number of applied updates.

tensorboard's own writer passes records to a thread. When the disk is full that thread dies with a
traceback, and the next write raises its error. Here a record is one `write`, and a failed one
leaves the file unchanged. `SummaryWriter.add_hparams` writes to a separate sub-run, and accepts
neither lists nor None.
"""

import errno
import io
import logging
import os
import socket
import time
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from tensorboard.compat.proto.event_pb2 import Event, SessionLog  # type: ignore[import-untyped]
from tensorboard.compat.proto.summary_pb2 import Summary  # type: ignore[import-untyped]
from tensorboard.compat.proto.tensor_pb2 import TensorProto  # type: ignore[import-untyped]
from tensorboard.plugins.hparams import (  # type: ignore[import-untyped]
    api_pb2,
    metadata,
    plugin_data_pb2,
)
from tensorboard.plugins.text import metadata as texts  # type: ignore[import-untyped]
from tensorboard.summary.writer.record_writer import RecordWriter  # type: ignore[import-untyped]
from torch.utils.tensorboard import summary as summaries
from torch.utils.tensorboard.summary import custom_scalars, histogram_raw, image, pr_curve_raw

from callbacks.support import require
from callbacks.trackers.recorder import UNFINISHED, Recorder, Value, config_of, leaves, varied
from trainer.callback import Results, saver_of
from trainer.media import Histogram, Media, PRCurve
from trainer.runs.status import TENSORBOARD, command
from trainer.state import LogPoint
from trainer.trainer import Trainer

_SUFFIX = ".regimen"
_TYPES = {bool: api_pb2.DATA_TYPE_BOOL, str: api_pb2.DATA_TYPE_STRING}  # others are numbers
_log = logging.getLogger(__name__)


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
        self.sizes: dict[str, int] = {}  # of this file and those of earlier processes

    def begin(self, trainer: Trainer) -> None:
        """Start a file, and truncate those of a resumed run to their sizes in the checkpoint."""
        folder, served, number = self.run / TENSORBOARD, command(self.run), len(self.sizes)
        _log.info("follow the run: %s", served)
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
        stages = "train/", "train/epoch_", "val/", "test/"
        charts = {n: ["Multiline", [f"^{stage}{n}$" for stage in stages]] for n in ordered}
        self._write(summary=custom_scalars({"training and validation": charts}))  # type: ignore[no-untyped-call]
        settings, swept = dict(leaves(config_of(self.run, trainer.config_text))), varied(self.run)
        # A group that is swept (`model`) has its override's value.
        chosen: dict[str, Value | None] = {k: settings.get(k, given) for k, given in swept.items()}
        chosen |= {
            k: v for k, v in settings.items() if any(fnmatchcase(k, p) for p in self._hparams)
        }
        if shown := {key: value for key, value in chosen.items() if value is not None}:
            saver = saver_of(trainer.callbacks)
            monitor = None if saver is None else saver.monitor
            compared = [f"best/{monitor}"] if monitor else [f"val/{name}" for name in names]
            compared += [f"test/{name}" for name in names]
            columns = {k: v for k, v in shown.items() if not swept or k in swept}
            self._write(summary=_columns(columns, bool(swept), compared))
            self._write(summary=summaries.hparams(shown, {})[1])  # type: ignore[no-untyped-call]  # its row

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
        """Close the session of the HParams tab; a run that can go on leaves it open."""
        if results.state not in UNFINISHED:
            failed = results.state == "failed"
            status = api_pb2.STATUS_FAILURE if failed else api_pb2.STATUS_SUCCESS
            info = plugin_data_pb2.SessionEndInfo(status=status)
            summary = _tab(metadata.SESSION_END_INFO_TAG, session_end_info=info)
            # A run that is resumed after all makes a running TensorBoard forget what is beyond.
            self._write(step=step + 1, summary=summary)

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
        # torch's function adds a part to the name.
        tensor = TensorProto(dtype="DT_STRING", string_val=[value.encode()])
        made = texts.create_summary_metadata(name, "")
        return Summary(value=[Summary.Value(tag=name, metadata=made, tensor=tensor)])
    if isinstance(value, Histogram):
        edges, counts = value.edges.tolist(), value.counts.tolist()
        sums = sum(counts), value.total, value.squares
        return histogram_raw(name, edges[0], edges[-1], *sums, edges[1:], counts)  # type: ignore[no-untyped-call]
    if isinstance(value, PRCurve):
        right = value.true_positives, value.false_positives
        wrong = value.true_negatives, value.false_negatives
        shares = value.precision, value.recall
        return pr_curve_raw(name, *right, *wrong, *shares, len(value.thresholds))  # type: ignore[no-untyped-call]
    return image(name, value, dataformats="HWC")  # type: ignore[no-untyped-call]


def _columns(settings: Mapping[str, Value], differs: bool, metrics: Sequence[str]) -> Summary:
    """Return the summary that declares settings and metrics: the columns of the HParams tab."""
    kinds = {k: _TYPES.get(type(v), api_pb2.DATA_TYPE_FLOAT64) for k, v in settings.items()}
    infos = [api_pb2.HParamInfo(name=k, type=kind, differs=differs) for k, kind in kinds.items()]
    named = [api_pb2.MetricInfo(name=api_pb2.MetricName(tag=tag)) for tag in metrics]
    experiment = api_pb2.Experiment(hparam_infos=infos, metric_infos=named)
    return _tab(metadata.EXPERIMENT_TAG, experiment=experiment)


def _tab(tag: str, **data: Any) -> Summary:
    made = metadata.create_summary_metadata(plugin_data_pb2.HParamsPluginData(**data))
    return Summary(value=[Summary.Value(tag=tag, metadata=made, tensor=metadata.NULL_TENSOR)])
