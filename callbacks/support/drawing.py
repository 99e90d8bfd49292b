"""Drawings made of pixels: sheets of pictures, matrices and curves."""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image as Pillow
from PIL import ImageDraw, ImageFont
from torch import Tensor

from trainer.media import Image, as_image

Color = tuple[int, int, int]
BLACK, GREY, RIGHT, WRONG = (0, 0, 0), (120, 120, 120), (0, 120, 0), (190, 0, 0)
_TILE = 64  # pixels that a small picture is enlarged to, at least
_LINE = 14  # height of a line of text
_GAP = 4


def is_picture(inputs: object) -> bool:
    """Return whether a batch's inputs are images: [n, 1 or 3, H, W]."""
    return isinstance(inputs, Tensor) and inputs.ndim == 4 and inputs.shape[1] in (1, 3)


def pixels(images: Tensor) -> list[Image]:
    """Return images [n, C, H, W] of any range, from the darkest value of all to the brightest."""
    values = images.detach().float().cpu()
    low, high = values.min(), values.max()
    return [as_image((image - low) / (high - low).clamp(min=1e-12)) for image in values]


def sheet(
    images: Sequence[Image],
    captions: Sequence[str] = (),
    colors: Sequence[Color] = (),
    columns: int = 8,
) -> Image:
    """Return images of one size side by side, small ones enlarged, each above its caption.

    The lines of a caption are cut to the width of an image.
    """
    factor = max(1, math.ceil(_TILE / max(images[0].shape[:2])))
    height, width = (size * factor for size in images[0].shape[:2])
    columns = min(columns, len(images))
    lines = max((text.count("\n") + 1 for text in captions), default=0)
    step_x, step_y = width + _GAP, height + _GAP + lines * _LINE
    rows = math.ceil(len(images) / columns)
    canvas = Pillow.new("RGB", (columns * step_x + _GAP, rows * step_y + _GAP), "white")
    draw, font = ImageDraw.Draw(canvas), ImageFont.load_default(11)
    for index, image in enumerate(images):
        x, y = _GAP + index % columns * step_x, _GAP + index // columns * step_y
        large = Pillow.fromarray(image).resize((width, height), Pillow.Resampling.NEAREST)
        canvas.paste(large, (x, y))
        if captions:
            text = "\n".join(line[: width // 6] for line in captions[index].split("\n"))
            color = colors[index] if colors else BLACK
            draw.multiline_text((x, y + height), text, color, font, spacing=2)
    return np.asarray(canvas)


def matrix(values: NDArray[np.float64], names: Sequence[str], text: str = "{:.0f}") -> Image:
    """Return a square matrix as shaded cells; rows are labels, columns are predictions.

    Values are written into the cells where there are at most 20 classes.
    """
    count, numbers = len(values), len(values) <= 20
    cell, side = (36 if numbers else max(6, 720 // count)), 80
    size = side + count * cell
    canvas = Pillow.new("RGB", (size + _GAP, size + _GAP), "white")
    draw, font = ImageDraw.Draw(canvas), ImageFont.load_default(11)
    largest = max(float(values.max(initial=0.0)), 1e-12)
    for row in range(count):
        for column in range(count):
            share = float(values[row, column]) / largest
            x, y = side + column * cell, side + row * cell
            shade = (int(255 - 215 * share), int(255 - 150 * share), 255)
            draw.rectangle((x, y, x + cell - 1, y + cell - 1), shade, (225, 225, 225))
            if numbers and values[row, column]:
                color = "white" if share > 0.6 else "black"
                shown = text.format(values[row, column])
                draw.text((x + cell / 2, y + cell / 2), shown, color, font, anchor="mm")
    for index, name in enumerate(names if cell >= 12 else ()):
        middle = side + index * cell + cell / 2
        draw.text((side - _GAP, middle), name[:12], BLACK, font, anchor="rm")
        draw.text((middle, side - _GAP), name[: cell // 6], BLACK, font, anchor="mb")
    draw.text((_GAP, _GAP), "rows: labels", GREY, font)
    draw.text((_GAP, _GAP + _LINE), "columns: predictions", GREY, font)
    return np.asarray(canvas)


def curve(
    x: Sequence[float], y: Sequence[float], mark: float | None = None, title: str = ""
) -> Image:
    """Plot y over a logarithmic x axis; `mark` is an x at which a line is drawn."""
    width, height, left, bottom, top = 640, 360, 70, 30, 24
    canvas = Pillow.new("RGB", (width, height), "white")
    draw, font = ImageDraw.Draw(canvas), ImageFont.load_default(11)
    points = [(math.log10(a), b) for a, b in zip(x, y, strict=True) if math.isfinite(b)]
    if not points:
        return np.asarray(canvas)
    (x0, x1), (y0, y1) = ((min(v), max(v)) for v in zip(*points, strict=True))
    across = (width - left - 10) / max(x1 - x0, 1e-12)
    up = (height - bottom - top) / max(y1 - y0, 1e-12)

    def place(a: float, b: float) -> tuple[float, float]:
        return left + (a - x0) * across, height - bottom - (b - y0) * up

    draw.rectangle((left, top, width - 10, height - bottom), None, GREY)
    draw.text((left, 4), title, BLACK, font)
    for power in range(math.ceil(x0), math.floor(x1) + 1):
        tick, _ = place(power, y0)
        draw.line((tick, top, tick, height - bottom), (225, 225, 225))
        draw.text((tick, height - bottom + 4), f"1e{power}", BLACK, font, anchor="ma")
    for value in (y0, (y0 + y1) / 2, y1):
        draw.text((left - 4, place(x0, value)[1]), f"{value:.4g}", BLACK, font, anchor="rm")
    if mark is not None and mark > 0:
        at, _ = place(math.log10(mark), y0)
        draw.line((at, top, at, height - bottom), WRONG, 2)
    draw.line([place(*point) for point in points], (30, 90, 200), 2)
    return np.asarray(canvas)


def overlay(image: Image, mask: Tensor, num_classes: int) -> Image:
    """Return an image with each class but the first in a color over it; other values are grey."""
    colors = torch.tensor([_color(index, num_classes) for index in range(num_classes)])
    known = (mask >= 0) & (mask < num_classes)
    painted = colors[mask.where(known, torch.zeros_like(mask))].float()
    painted[~known] = 128.0
    alpha = (0.6 * (mask != 0).float())[..., None]
    mixed = torch.tensor(image).float() * (1 - alpha) + painted * alpha
    return mixed.byte().numpy()


def _color(index: int, count: int) -> list[int]:
    color = Pillow.new("HSV", (1, 1), (int(255 * index / max(count, 1)), 255, 255))
    return list(np.asarray(color.convert("RGB"))[0, 0].tolist())


def drawn(figure: Any) -> Image:
    """Return a figure of matplotlib's as an image."""
    file = io.BytesIO()
    figure.savefig(file, format="png")
    return np.asarray(Pillow.open(file).convert("RGB"))
