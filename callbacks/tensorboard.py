"""Write what is logged to TensorBoard; the x axis is the number of applied updates.

tensorboard's own writer passes records to a thread. When the disk is full that thread dies with a
traceback, and the next write raises its error. Here a record is one `write`, and a failed one
leaves the file unchanged. `SummaryWriter.add_hparams` writes to a separate sub-run, and accepts
neither lists nor None.
"""

import errno
import functools
import logging
import os
import socket
import struct
import time
from collections.abc import Collection, Mapping, Sequence
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
from torch.utils.tensorboard.summary import custom_scalars, histogram_raw, image, pr_curve_raw

from callbacks.recorders.recorder import UNFINISHED, Recorder
from callbacks.recorders.settings import Value, leaves, read_overrides, swept_keys
from callbacks.support.errors import CallbackError
from trainer.callback import Results, saver_of
from trainer.media import Histogram, Media, PRCurve
from trainer.runs.directory import CONFIG
from trainer.runs.status import TENSORBOARD, command, own_values
from trainer.state import LogPoint
from trainer.trainer import Trainer

_SUFFIX = ".regimen"
_log = logging.getLogger(__name__)


class TensorBoard(Recorder):
    """Write all that is logged, and hyper-parameters, to `tensorboard/` in the run directory.

    The HParams tab shows what a sweep varies; for a run by itself what matches `hparams`, globs
    over the dotted keys of the run's `config.yaml`; and the best value of the monitored metric with
    those of the test. The Custom Scalars tab has training and validation in one chart. A full disk
    causes a warning, and the run continues.
    """

    def __init__(self, hparams: Sequence[str] = ()) -> None:
        super().__init__()
        if isinstance(hparams, str):  # a string is a Sequence as well
            raise CallbackError(f"hparams={hparams!r}: give a list of globs, such as [{hparams}]")
        self._hparams = hparams
        self._file: _EventFile | None = None
        self._sizes: dict[str, int] = {}  # of the files of earlier processes

    def begin(self, trainer: Trainer) -> None:
        """Start a file, and truncate those of a resumed run to their sizes in the checkpoint."""
        assert self.run is not None
        served = command(self.run)
        _log.info("follow the run: %s", served, extra={"command": served})
        _rewind(self.run / TENSORBOARD, self._sizes)
        self._file = file = _EventFile(self.run / TENSORBOARD, len(self._sizes))
        if trainer.resumed:
            file.purge(trainer.state.global_step + 1)
        if self._sizes:  # TensorBoard keeps what the first file says of charts and settings
            return
        file.summary(0, _layout(trainer.task.metric_names()))
        swept = swept_keys(self.run)
        if hparams := _read_hparams(self.run, self._hparams, swept):
            file.summary(0, _columns(hparams, swept, _outcomes(trainer)))
            file.summary(0, _session_start(hparams))

    def record(self, trainer: Trainer, at: LogPoint, values: Mapping[str, float]) -> None:
        """Write scalars."""
        if self._file is not None:
            self._file.scalars(at.step, values)

    def show(self, trainer: Trainer, at: LogPoint, name: str, value: Media) -> None:
        """Write an image, a histogram, a text or a curve."""
        if self._file is not None:
            self._file.summary(at.step, _summary(name, value))

    def write_graph(self, graph: bytes) -> None:
        """Write a model's graph, a serialized GraphDef."""
        if (file := self._file) is not None:
            self.attempt(lambda: file.event(Event(graph_def=graph)))

    def end(self, trainer: Trainer, results: Results) -> None:
        """Close the session of the HParams tab; a run that can go on leaves it open."""
        if self._file is not None and results.state not in UNFINISHED:
            # A run that is resumed after all makes a running TensorBoard forget what is beyond.
            end = _session_end(failed=results.state == "failed")
            self._file.summary(trainer.state.global_step + 1, end)

    def state_dict(self) -> dict[str, Any]:
        """Return the files and their sizes."""
        own = {self._file.path.name: self._file.size} if self._file is not None else {}
        return {"sizes": {**self._sizes, **own}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what has been written."""
        self._sizes = dict(state["sizes"])


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


def _layout(metrics: Sequence[str]) -> Summary:
    """Return a chart for each metric, the loss first: training and validation, as patterns."""
    names = sorted(dict.fromkeys(metrics), key=lambda name: not name.startswith("loss"))
    stages = "train/", "train/epoch_", "val/", "test/"
    charts = {n: ["Multiline", [f"^{stage}{n}$" for stage in stages]] for n in names}
    return custom_scalars({"training and validation": charts})  # type: ignore[no-untyped-call]


def _outcomes(trainer: Trainer) -> list[str]:
    """Return the metrics that runs are compared by: the best value, and those of the test."""
    saver, metrics = saver_of(trainer.callbacks), trainer.task.metric_names()
    monitor = None if saver is None else saver.monitor
    best = [f"best/{monitor}"] if monitor else [f"val/{name}" for name in metrics]
    return [*best, *(f"test/{name}" for name in metrics)]


def _read_hparams(run: Path, patterns: Sequence[str], swept: Sequence[str]) -> dict[str, Value]:
    """Return the settings of a run: the swept ones, then those whose keys match a pattern.

    Dotted keys of `config.yaml`; a group that is swept (`model`) has the value of its override.
    """
    config = run / CONFIG
    if not config.exists():
        return {}
    settings = dict(leaves(own_values(config.read_text(encoding="utf-8"))))
    given = read_overrides(run)
    varied = {key: settings.get(key, given.get(key)) for key in swept}
    matched = {k: v for k, v in settings.items() if any(fnmatchcase(k, p) for p in patterns)}
    return {key: value for key, value in (varied | matched).items() if value is not None}


def _columns(
    hparams: Mapping[str, Value], swept: Collection[str], metrics: Sequence[str]
) -> Summary:
    """Return the summary that declares settings and metrics: the columns of the tab."""
    shown = {key: value for key, value in hparams.items() if not swept or key in swept}
    experiment = api_pb2.Experiment(
        hparam_infos=[
            api_pb2.HParamInfo(name=key, type=_type(value), differs=bool(swept))
            for key, value in shown.items()
        ],
        metric_infos=[api_pb2.MetricInfo(name=api_pb2.MetricName(tag=tag)) for tag in metrics],
    )
    return _of_session(
        metadata.EXPERIMENT_TAG, plugin_data_pb2.HParamsPluginData(experiment=experiment)
    )


def _session_start(hparams: Mapping[str, Value]) -> Summary:
    """Return the summary with the settings: it begins the run's row."""
    start = plugin_data_pb2.SessionStartInfo()
    for key, value in hparams.items():
        if isinstance(value, bool):
            start.hparams[key].bool_value = value
        elif isinstance(value, str):
            start.hparams[key].string_value = value
        else:
            start.hparams[key].number_value = value
    data = plugin_data_pb2.HParamsPluginData(session_start_info=start)
    return _of_session(metadata.SESSION_START_INFO_TAG, data)


def _session_end(*, failed: bool) -> Summary:
    """Return the summary that ends a session; one that may go on later has none."""
    status = api_pb2.STATUS_FAILURE if failed else api_pb2.STATUS_SUCCESS
    end = plugin_data_pb2.SessionEndInfo(status=status)
    data = plugin_data_pb2.HParamsPluginData(session_end_info=end)
    return _of_session(metadata.SESSION_END_INFO_TAG, data)


def _of_session(tag: str, data: plugin_data_pb2.HParamsPluginData) -> Summary:
    made = metadata.create_summary_metadata(data)
    return Summary(value=[Summary.Value(tag=tag, metadata=made, tensor=metadata.NULL_TENSOR)])


def _type(value: Value) -> Any:
    if isinstance(value, bool):
        return api_pb2.DATA_TYPE_BOOL
    return api_pb2.DATA_TYPE_STRING if isinstance(value, str) else api_pb2.DATA_TYPE_FLOAT64


class _EventFile:
    """Append events to one file of a log directory; every method may raise OSError.

    The file is opened for each record. There are few records, and no file is left open.
    """

    def __init__(self, folder: Path, number: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        # TensorBoard reads the files of a folder in the order of their names.
        stamp = f"{int(time.time()):010d}.{socket.gethostname()}.{number}"
        self.path = folder / f"events.out.tfevents.{stamp}{_SUFFIX}"
        self.size = 0
        self.event(Event(file_version="brain.Event:2"))

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """Append scalars at a step."""
        pairs = [Summary.Value(tag=tag, simple_value=value) for tag, value in values.items()]
        self.summary(step, Summary(value=pairs))

    def summary(self, step: int, summary: Summary) -> None:
        """Append a summary at a step."""
        self.event(Event(step=step, summary=summary))

    def purge(self, step: int) -> None:
        """Make a running TensorBoard drop the values that it has read from `step` on."""
        self.event(Event(step=step, session_log=SessionLog(status=SessionLog.START)))

    def event(self, event: Event) -> None:
        """Append an event completely, or raise OSError and leave the file unchanged."""
        event.wall_time = time.time()
        content = _record(event.SerializeToString())
        # Only the first record makes the file: under its name there may be another run's folder.
        make = 0 if self.size else os.O_CREAT
        descriptor = os.open(self.path, os.O_WRONLY | os.O_APPEND | make, 0o666)
        try:
            if os.write(descriptor, content) < len(content):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:
            os.ftruncate(descriptor, self.size)
            raise OSError(error.errno, error.strerror, str(self.path)) from error
        finally:
            os.close(descriptor)
        self.size += len(content)


def _rewind(folder: Path, sizes: Mapping[str, int]) -> None:
    """Truncate our files to the sizes of a checkpoint, and remove those that it does not have."""
    for path in folder.glob(f"events.out.tfevents.*{_SUFFIX}"):
        if path.name not in sizes:
            path.unlink()
        elif path.stat().st_size > sizes[path.name]:
            os.truncate(path, sizes[path.name])


def _record(content: bytes) -> bytes:
    length = struct.pack("<Q", len(content))
    return b"".join((length, _checksum(length), content, _checksum(content)))


def _checksum(content: bytes) -> bytes:
    # CRC-32C, rotated and shifted as TensorFlow's records have it; zlib has another polynomial.
    crc, table = 0xFFFFFFFF, _table()
    for byte in content:
        crc = table[(crc ^ byte) & 0xFF] ^ (crc >> 8)
    crc ^= 0xFFFFFFFF
    return struct.pack("<I", (((crc >> 15) | (crc << 17)) + 0xA282EAD8) & 0xFFFFFFFF)


@functools.cache
def _table() -> list[int]:
    table = list(range(256))
    for _ in range(8):
        table = [(crc >> 1) ^ (0x82F63B78 if crc & 1 else 0) for crc in table]
    return table
