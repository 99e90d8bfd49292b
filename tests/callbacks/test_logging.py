"""Images, histograms, texts and figures reach every callback that receives them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from trainer.callback import Callback, Results
from trainer.media import PRCurve, as_image
from trainer.state import LogPoint


class Tracker(Callback):
    """What a tracker of one's own looks like."""

    def __init__(self) -> None:
        self.got: dict[str, tuple[Any, LogPoint]] = {}
        self.ends: list[Results] = []

    def on_media(self, trainer: Any, name: str, media: Any) -> None:
        self.got[name] = (media, trainer.log_point)

    def on_run_end(self, trainer: Any, results: Results) -> None:
        self.ends.append(results)


class Figure:
    """All that is asked of a figure of matplotlib's."""

    def savefig(self, file: Any, format: str) -> None:
        Image.new("RGB", (5, 3), (255, 0, 0)).save(file, format)


def test_all_that_is_logged_reaches_all_that_receive_it(make_trainer: Any) -> None:
    trackers = [Tracker(), Tracker()]
    trainer = make_trainer(dict(zip("ab", trackers, strict=True)), max_epochs=1)
    trainer.fit()
    curve = PRCurve(*(np.zeros(3) for _ in range(5)))
    trainer.log_image("an/image", torch.tensor([[0.0, 0.5], [1.0, 0.25]]))
    trainer.log_histogram("a/histogram", np.arange(8), bins=4)
    trainer.log_text("a/text", "**bold**")
    trainer.log_figure("a/figure", Figure())
    trainer.log_pr_curve("a/curve", curve)
    for got in (tracker.got for tracker in trackers):
        assert {point for _, point in got.values()} == {LogPoint(step=5, epoch=1)}
        assert got["an/image"][0][:, :, 0].tolist() == [[0, 128], [255, 64]]
        assert got["a/histogram"][0].counts.tolist() == [2, 2, 2, 2]
        assert got["a/text"][0] == "**bold**"
        assert (got["a/figure"][0] == [255, 0, 0]).all()
        assert got["a/curve"][0] == curve


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
