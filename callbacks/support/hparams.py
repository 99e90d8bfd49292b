"""The settings of a run for TensorBoard's HParams tab, in the run's own event file.

`SummaryWriter.add_hparams` writes them to a separate sub-run, and accepts neither lists nor None.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import yaml
from tensorboard.compat.proto.summary_pb2 import Summary  # type: ignore[import-untyped]
from tensorboard.plugins.hparams import api_pb2, metadata, plugin_data_pb2  # type: ignore[import-untyped]

Value = bool | int | float | str


def read_hparams(config: Path, patterns: Sequence[str]) -> dict[str, Value]:
    """Return the settings of a YAML file, if it exists, whose dotted keys match a pattern."""
    if not patterns or not config.exists():
        return {}
    leaves = _leaves("", yaml.safe_load(config.read_text(encoding="utf-8")))
    return {
        key: value
        for key, value in leaves
        if value is not None and any(fnmatchcase(key, pattern) for pattern in patterns)
    }


def session_start(hparams: Mapping[str, Value], metrics: Sequence[str]) -> list[Summary]:
    """Return the summaries that declare settings and metrics, and those with the settings."""
    experiment = api_pb2.Experiment(
        hparam_infos=[api_pb2.HParamInfo(name=k, type=_type(v)) for k, v in hparams.items()],
        metric_infos=[
            api_pb2.MetricInfo(name=api_pb2.MetricName(tag=f"{stage}/{metric}"))
            for stage in ("val", "test")
            for metric in metrics
        ],
    )
    start = plugin_data_pb2.SessionStartInfo()
    for key, value in hparams.items():
        if isinstance(value, bool):
            start.hparams[key].bool_value = value
        elif isinstance(value, str):
            start.hparams[key].string_value = value
        else:
            start.hparams[key].number_value = value
    return [
        _summary(metadata.EXPERIMENT_TAG, plugin_data_pb2.HParamsPluginData(experiment=experiment)),
        _summary(
            metadata.SESSION_START_INFO_TAG,
            plugin_data_pb2.HParamsPluginData(session_start_info=start),
        ),
    ]


def session_end(*, failed: bool) -> Summary:
    """Return the summary that ends a session."""
    status = api_pb2.STATUS_FAILURE if failed else api_pb2.STATUS_SUCCESS
    end = plugin_data_pb2.SessionEndInfo(status=status)
    return _summary(
        metadata.SESSION_END_INFO_TAG, plugin_data_pb2.HParamsPluginData(session_end_info=end)
    )


def _summary(tag: str, data: plugin_data_pb2.HParamsPluginData) -> Summary:
    value = Summary.Value(tag=tag, metadata=metadata.create_summary_metadata(data))
    value.tensor.CopyFrom(metadata.NULL_TENSOR)
    return Summary(value=[value])


def _leaves(prefix: str, node: Any) -> Iterator[tuple[str, Value | None]]:
    if isinstance(node, dict):
        for key, child in node.items():
            yield from _leaves(f"{prefix}.{key}" if prefix else str(key), child)
    else:
        yield prefix, str(node) if isinstance(node, list) else node


def _type(value: Value) -> Any:
    if isinstance(value, bool):
        return api_pb2.DATA_TYPE_BOOL
    return api_pb2.DATA_TYPE_STRING if isinstance(value, str) else api_pb2.DATA_TYPE_FLOAT64
