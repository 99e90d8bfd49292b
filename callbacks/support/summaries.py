"""What TensorBoard's tabs read: images, histograms, texts, curves and a layout of charts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from tensorboard.compat.proto.summary_pb2 import (  # type: ignore[import-untyped]
    HistogramProto,
    Summary,
    SummaryMetadata,
)
from tensorboard.compat.proto.tensor_pb2 import TensorProto  # type: ignore[import-untyped]
from tensorboard.compat.proto.tensor_shape_pb2 import (  # type: ignore[import-untyped]
    TensorShapeProto,
)
from tensorboard.plugins.custom_scalar import layout_pb2  # type: ignore[import-untyped]
from tensorboard.plugins.custom_scalar import metadata as custom_scalar
from tensorboard.plugins.pr_curve import metadata as pr_curves  # type: ignore[import-untyped]
from tensorboard.plugins.text import metadata as texts  # type: ignore[import-untyped]

from callbacks.support.drawing import png
from trainer.media import Histogram, Image, PRCurve


def shown_summary(name: str, value: Image | Histogram | PRCurve | str) -> Summary:
    """Return what a run shows for the tab of its kind."""
    if isinstance(value, str):
        return text_summary(name, value)
    if isinstance(value, Histogram):
        return histogram_summary(name, value)
    if isinstance(value, PRCurve):
        return pr_curve_summary(name, value)
    return image_summary(name, value)


def image_summary(name: str, image: Image) -> Summary:
    """Return an image for the Images tab."""
    height, width = image.shape[:2]
    value = Summary.Image(height=height, width=width, colorspace=3, encoded_image_string=png(image))
    return Summary(value=[Summary.Value(tag=name, image=value)])


def histogram_summary(name: str, histogram: Histogram) -> Summary:
    """Return a histogram for the Histograms and Distributions tabs."""
    value = HistogramProto(
        min=histogram.edges[0],
        max=histogram.edges[-1],
        num=float(histogram.counts.sum()),
        sum=histogram.total,
        sum_squares=histogram.squares,
        bucket_limit=histogram.edges[1:].tolist(),
        bucket=histogram.counts.tolist(),
    )
    return Summary(value=[Summary.Value(tag=name, histo=value)])


def text_summary(name: str, text: str) -> Summary:
    """Return a text, in Markdown, for the Text tab."""
    return _text(name, text.encode(), texts.create_summary_metadata(name, ""))


def pr_curve_summary(name: str, curve: PRCurve) -> Summary:
    """Return a curve for the PR Curves tab."""
    rows = np.stack(
        [
            curve.true_positives,
            curve.false_positives,
            curve.true_negatives,
            curve.false_negatives,
            curve.precision,
            curve.recall,
        ]
    )
    shape = TensorShapeProto(dim=[TensorShapeProto.Dim(size=size) for size in rows.shape])
    content = rows.astype("<f4").tobytes()
    tensor = TensorProto(dtype="DT_FLOAT", tensor_content=content, tensor_shape=shape)
    metadata = pr_curves.create_summary_metadata(name, "", rows.shape[1])
    return Summary(value=[Summary.Value(tag=name, metadata=metadata, tensor=tensor)])


def layout_summary(charts: Mapping[str, Sequence[str]]) -> Summary:
    """Return what the Custom Scalars tab shows: each chart with the curves of some tags."""
    layout = layout_pb2.Layout(
        category=[
            layout_pb2.Category(
                title="training and validation",
                chart=[
                    layout_pb2.Chart(
                        title=title,
                        multiline=layout_pb2.MultilineChartContent(
                            tag=[f"^{tag}$" for tag in tags]  # regular expressions
                        ),
                    )
                    for title, tags in charts.items()
                ],
            )
        ]
    )
    content, metadata = layout.SerializeToString(), custom_scalar.create_summary_metadata()
    return _text(custom_scalar.CONFIG_SUMMARY_TAG, content, metadata)


def _text(name: str, content: bytes, metadata: SummaryMetadata) -> Summary:
    tensor = TensorProto(dtype="DT_STRING", string_val=[content], tensor_shape=TensorShapeProto())
    return Summary(value=[Summary.Value(tag=name, metadata=metadata, tensor=tensor)])
