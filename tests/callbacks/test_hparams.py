"""The summaries of the HParams tab against those that tensorboard's own functions make."""

from collections.abc import Callable
from typing import Any

import pytest
from tensorboard.compat.proto.summary_pb2 import Summary  # type: ignore[import-untyped]
from tensorboard.plugins.hparams import metadata  # type: ignore[import-untyped]

from callbacks.support.hparams import columns, session_end, session_start


@pytest.mark.parametrize(
    ("made", "tag", "parse"),
    [
        pytest.param(
            columns({"a": 1}, ["a"], ["val/loss"]),
            metadata.EXPERIMENT_TAG,
            metadata.parse_experiment_plugin_data,
            id="columns",
        ),
        pytest.param(
            session_start({"a": 1, "b": "c", "d": True}),
            metadata.SESSION_START_INFO_TAG,
            metadata.parse_session_start_info_plugin_data,
            id="start",
        ),
        pytest.param(
            session_end(failed=True),
            metadata.SESSION_END_INFO_TAG,
            metadata.parse_session_end_info_plugin_data,
            id="end",
        ),
    ],
)
def test_a_summary_is_what_the_tab_reads(
    made: Summary, tag: str, parse: Callable[[bytes], Any]
) -> None:
    (value,) = made.value
    assert parse(value.metadata.plugin_data.content).ByteSize() > 0
    data = metadata.plugin_data_pb2.HParamsPluginData.FromString(value.metadata.plugin_data.content)
    expected = Summary.Value(tag=tag, metadata=metadata.create_summary_metadata(data))
    # A map is serialized in any order.
    assert parse(expected.metadata.plugin_data.content) == parse(value.metadata.plugin_data.content)
    expected.metadata.plugin_data.content = value.metadata.plugin_data.content
    expected.tensor.CopyFrom(metadata.NULL_TENSOR)
    assert value == expected
