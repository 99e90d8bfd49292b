"""Images, histograms, texts and figures reach every callback that receives them."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.util import tensor_util

from callbacks.tensorboard import TensorBoard
from trainer.callback import Callback, Results
from trainer.media import PRCurve, as_image, histogram_of
from trainer.state import LogPoint

HOOKS = ("on_image", "on_histogram", "on_text", "on_figure", "on_pr_curve")


class Tracker(Callback):
    """What a tracker of one's own looks like."""

    def __init__(self) -> None:
        self.got: dict[str, tuple[str, Any, LogPoint]] = {}
        self.ends: list[Results] = []

    def on_image(self, trainer: Any, name: str, image: Any) -> None:
        self.got["on_image"] = (name, image, trainer.log_point)

    def on_histogram(self, trainer: Any, name: str, histogram: Any) -> None:
        self.got["on_histogram"] = (name, histogram, trainer.log_point)

    def on_text(self, trainer: Any, name: str, text: str) -> None:
        self.got["on_text"] = (name, text, trainer.log_point)

    def on_figure(self, trainer: Any, name: str, figure: Any) -> None:
        self.got["on_figure"] = (name, figure, trainer.log_point)

    def on_pr_curve(self, trainer: Any, name: str, curve: Any) -> None:
        self.got["on_pr_curve"] = (name, curve, trainer.log_point)

    def on_run_end(self, trainer: Any, results: Results) -> None:
        self.ends.append(results)


class Figure:
    """All that is asked of a figure of matplotlib's."""

    def savefig(self, file: Any, format: str) -> None:
        Image.new("RGB", (5, 3), (255, 0, 0)).save(file, format)


CURVE = PRCurve(
    thresholds=np.array([0.0, 0.5, 1.0]),
    true_positives=np.array([4.0, 3.0, 0.0]),
    false_positives=np.array([6.0, 1.0, 0.0]),
    true_negatives=np.array([0.0, 5.0, 6.0]),
    false_negatives=np.array([0.0, 1.0, 4.0]),
)


class Shows(Callback):
    """Log one of each at the end of the first epoch."""

    def on_epoch_end(self, trainer: Any) -> None:
        if trainer.state.epoch == 1:
            trainer.log_image("an/image", torch.tensor([[0.0, 0.5], [1.0, 0.25]]))
            trainer.log_histogram("a/histogram", torch.arange(8.0), bins=4)
            trainer.log_text("a/text", "**bold**")
            trainer.log_figure("a/figure", Figure())
            trainer.log_pr_curve("a/curve", CURVE)


def test_all_that_is_logged_reaches_all_that_receive_it(make_trainer: Any, tmp_path: Path) -> None:
    first, second = Tracker(), Tracker()
    callbacks = {"a": first, "tensorboard": TensorBoard(), "shows": Shows(), "b": second}
    make_trainer(callbacks, tmp_path).fit()
    assert first.got.keys() == second.got.keys() == set(HOOKS)
    assert {point for _, _, point in first.got.values()} == {LogPoint(step=5, epoch=1)}
    assert first.got["on_image"][1][:, :, 0].tolist() == [[0, 128], [255, 64]]
    assert first.got["on_histogram"][1].counts.tolist() == [2, 2, 2, 2]
    assert first.got["on_text"][:2] == ("a/text", "**bold**")

    board = EventAccumulator(str(tmp_path / "tensorboard"))
    board.Reload()
    assert [event.step for event in board.Images("an/image")] == [5]
    stored = Image.open(io.BytesIO(board.Images("an/image")[0].encoded_image_string))
    assert np.array_equal(np.asarray(stored), first.got["on_image"][1])
    figure = Image.open(io.BytesIO(board.Images("a/figure")[0].encoded_image_string))
    assert (figure.size, figure.getpixel((0, 0))) == ((5, 3), (255, 0, 0))
    histogram = board.Histograms("a/histogram")[0].histogram_value
    assert (histogram.num, histogram.sum, histogram.sum_squares) == (8, 28.0, 140.0)
    (text,) = board.Tensors("a/text")
    assert tensor_util.make_ndarray(text.tensor_proto).item() == b"**bold**"
    (curve,) = board.Tensors("a/curve")
    rows = tensor_util.make_ndarray(curve.tensor_proto)
    assert np.allclose(rows[4], [0.4, 0.75, 1.0])
    assert np.allclose(rows[5], [1.0, 0.75, 0.0])


def test_nothing_is_read_where_nobody_receives_it(make_trainer: Any) -> None:
    trainer = make_trainer({})
    with torch.device("meta"):
        trainer.log_image("image", torch.empty(3, 4, 4))  # has no values to read
        trainer.log_histogram("histogram", torch.empty(4))


def test_the_end_is_told_once_and_an_error_in_it_changes_nothing(
    make_trainer: Any, caplog: Any
) -> None:
    class Breaks(Callback):
        def on_run_end(self, trainer: Any, results: Results) -> None:
            raise ValueError("no network")

    tracker = Tracker()
    trainer = make_trainer({"breaks": Breaks(), "tracker": tracker})
    trainer.end(Results("failed"))  # before anything was set up: there is nothing to end
    trainer.fit()
    results = Results("finished", {"test/loss": 0.5})
    trainer.end(results)
    trainer.end(Results("failed"))
    assert tracker.ends == [results]
    assert [r.getMessage() for r in caplog.records] == ["Breaks.on_run_end failed: no network"]


@pytest.mark.parametrize(
    ("image", "pixel"),
    [
        pytest.param(torch.tensor([[0.5]]), [128] * 3, id="grey"),
        pytest.param(torch.tensor([[[1.0]], [[0.0]], [[2.0]]]), [255, 0, 255], id="clipped"),
        pytest.param(torch.tensor([[[7]], [[8]], [[9]]]).byte(), [7, 8, 9], id="uint8"),
        pytest.param(torch.full((3, 1, 1), 0.5, dtype=torch.bfloat16), [128] * 3, id="bfloat16"),
        pytest.param(np.array([[[7, 8, 9]]], dtype=np.uint8), [7, 8, 9], id="numpy: H, W, C"),
        pytest.param(Image.new("RGBA", (1, 1), (7, 8, 9, 0)), [7, 8, 9], id="PIL"),
        pytest.param(torch.tensor([[float("nan")]]), [0, 0, 0], id="nan"),
        pytest.param(torch.tensor([[True]]), [255] * 3, id="bool"),
    ],
)
def test_images_of_any_kind(image: Any, pixel: list[int]) -> None:
    array = as_image(image)
    assert (array.shape, array.dtype, array[0, 0].tolist()) == ((1, 1, 3), np.uint8, pixel)


def test_what_is_no_image_is_refused() -> None:
    with pytest.raises(ValueError, match=r"an image of shape \[1, 2, 5\]"):
        as_image(torch.zeros(5, 1, 2))


def test_a_histogram_takes_any_numbers() -> None:
    assert histogram_of(np.array([1, 2, 3]), bins=1).total == 6.0
