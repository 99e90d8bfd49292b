"""The settings of a run for TensorBoard's HParams tab, in the run's own event file.

`SummaryWriter.add_hparams` writes them to a separate sub-run, and accepts neither lists nor None.
What varies in a sweep is marked as such: TensorBoard shows those columns first, then the others in
the order of their names. The seed is marked as well where that puts it behind what is swept.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from tensorboard.compat.proto.summary_pb2 import Summary  # type: ignore[import-untyped]
from tensorboard.compat.proto.types_pb2 import DT_FLOAT  # type: ignore[import-untyped]
from tensorboard.plugins.hparams import api_pb2, plugin_data_pb2  # type: ignore[import-untyped]

from callbacks.support.settings import Value, leaves, read_overrides
from trainer.files.own_yaml import own_values

# As in `tensorboard.plugins.hparams.metadata`, which imports a stand-in for TensorFlow: 0.3 s.
_TAG = "_hparams_"
_VERSION = 0

_SEED = "seed"


def read_hparams(run: Path, patterns: Sequence[str], swept: Sequence[str]) -> dict[str, Value]:
    """Return the settings of a run: the swept ones, then those whose keys match a pattern.

    Dotted keys of `config.yaml`; a group that is swept (`model`) has the value of its override.
    """
    config = run / "config.yaml"
    if not config.exists():
        return {}
    settings = dict(leaves(own_values(config.read_text(encoding="utf-8"))))
    given = read_overrides(run / "overrides.yaml")
    varied = {key: settings.get(key, given.get(key)) for key in swept}
    matched = {k: v for k, v in settings.items() if any(fnmatchcase(k, p) for p in patterns)}
    found = varied | matched
    return {key: value for key, value in found.items() if value is not None}


def columns(
    hparams: Mapping[str, Value], swept: Collection[str], metrics: Sequence[str]
) -> Summary:
    """Return the summary that declares settings and metrics: the columns of the tab."""
    first = {*swept, _SEED} if all(key < _SEED for key in swept) else swept
    experiment = api_pb2.Experiment(
        hparam_infos=[
            api_pb2.HParamInfo(name=key, type=_type(value), differs=key in first)
            for key, value in hparams.items()
        ],
        metric_infos=[api_pb2.MetricInfo(name=api_pb2.MetricName(tag=tag)) for tag in metrics],
    )
    data = plugin_data_pb2.HParamsPluginData(experiment=experiment)
    return _summary("experiment", data)


def session_start(hparams: Mapping[str, Value]) -> Summary:
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
    return _summary("session_start_info", data)


def session_end(*, failed: bool) -> Summary:
    """Return the summary that ends a session; one that may go on later has none."""
    status = api_pb2.STATUS_FAILURE if failed else api_pb2.STATUS_SUCCESS
    end = plugin_data_pb2.SessionEndInfo(status=status)
    data = plugin_data_pb2.HParamsPluginData(session_end_info=end)
    return _summary("session_end_info", data)


def _summary(tag: str, data: plugin_data_pb2.HParamsPluginData) -> Summary:
    data.version = _VERSION
    value = Summary.Value(tag=f"{_TAG}/{tag}")
    value.metadata.plugin_data.plugin_name = "hparams"
    value.metadata.plugin_data.content = data.SerializeToString(deterministic=True)
    value.tensor.dtype = DT_FLOAT
    value.tensor.tensor_shape.dim.add(size=0)
    return Summary(value=[value])


def _type(value: Value) -> Any:
    if isinstance(value, bool):
        return api_pb2.DATA_TYPE_BOOL
    return api_pb2.DATA_TYPE_STRING if isinstance(value, str) else api_pb2.DATA_TYPE_FLOAT64
