"""Drawings made of pixels: sheets of pictures, matrices and curves."""

import colorsys
import math
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image as Pillow
from PIL import ImageDraw, ImageFont
from torch import Tensor, nn
from torchvision.utils import draw_segmentation_masks, make_grid

from trainer.media import Image

Color = tuple[int, int, int]
BLACK, GREY = (0, 0, 0), (128, 128, 128)
RIGHT, WRONG = (0, 120, 0), (190, 0, 0)
_TILE = 96  # pixels that a small picture is enlarged to, at least
_WIDEST = 160  # pixels of a caption
_TEXT, _LINE, _GAP = 14, 18, 4  # pixels: size of letters, height of a line, between pictures


def is_picture(inputs: object) -> bool:
    """Return whether a batch's inputs are images: [n, 1 or 3, H, W]."""
    return isinstance(inputs, Tensor) and inputs.ndim == 4 and inputs.shape[1] in (1, 3)


def pixels(images: Tensor) -> Tensor:
    """Return images [n, C, H, W] of any range as uint8 [n, 3, H, W] on the host.

    The darkest value of all is black, the brightest white.
    """
    values = images.detach().float().cpu()
    low, high = values.min(), values.max()
    shares = ((values - low) / (high - low).clamp(min=1e-12)).nan_to_num().clamp(0, 1)
    return (shares * 255 + 0.5).byte().expand(-1, 3, -1, -1)


def sheet(
    images: Tensor, captions: Sequence[str] = (), colors: Sequence[Color] = (), columns: int = 4
) -> Image:
    """Return images, uint8 [n, 3, H, W], side by side, small ones enlarged, above captions."""
    factor = max(1, math.ceil(_TILE / max(images.shape[2:])))
    large = images.repeat_interleave(factor, 2).repeat_interleave(factor, 3)
    font = ImageFont.load_default(_TEXT)
    lines = [line for caption in captions for line in caption.split("\n")]
    widest = math.ceil(max(map(font.getlength, lines), default=0))
    room = max(0, min(widest, _WIDEST) - large.shape[3])
    below = _LINE * max((caption.count("\n") + 1 for caption in captions), default=0)
    tiles = nn.functional.pad(large, (0, room, 0, below), value=255)
    grid = make_grid(tiles, nrow=columns, padding=_GAP, pad_value=255)
    canvas = Pillow.fromarray(grid.permute(1, 2, 0).contiguous().numpy())
    draw, (height, width) = ImageDraw.Draw(canvas), tiles.shape[2:]
    for index, caption in enumerate(captions):
        row, column = divmod(index, columns)
        x, y = _GAP + column * (width + _GAP), (row + 1) * (height + _GAP) - below
        for place, line in enumerate(caption.split("\n")):
            while font.getlength(line) > width:
                line = line[:-1]
            draw.text((x, y + place * _LINE), line, colors[index] if colors else BLACK, font)
    return np.asarray(canvas)


def matrix(values: NDArray[np.float64], names: Sequence[str], text: str = "{:.0f}") -> Image:
    """Return a square matrix as shaded cells; rows are labels, columns are predictions.

    Names and values are written where there are at most 20 classes.
    """
    count, font = len(values), ImageFont.load_default(_TEXT)
    names = [name[:12] for name in names] if count <= 20 else []
    longest = math.ceil(max(map(font.getlength, names), default=0))
    cell = max(48, longest + 8) if names else max(6, 720 // count)
    left, top = longest + 2 * _GAP, 2 * _LINE if names else _LINE
    shares = (values / max(float(values.max(initial=0.0)), 1e-12))[..., None]
    shades = Pillow.fromarray((255 - shares * (215, 150, 0)).astype(np.uint8))
    size = cell * count
    canvas = Pillow.new("RGB", (max(left + size, 240), top + size), "white")
    canvas.paste(shades.resize((size, size), Pillow.Resampling.NEAREST), (left, top))
    draw = ImageDraw.Draw(canvas)
    draw.text((_GAP, 0), "rows: labels, columns: predictions", GREY, font)
    for row, name in enumerate(names):
        center = top + cell * row + cell // 2
        draw.text((left - _GAP, center), name, BLACK, font, anchor="rm")
        draw.text((left + cell * row + cell // 2, top), name, BLACK, font, anchor="md")
        for column in np.nonzero(values[row])[0].tolist():
            color = "white" if shares[row, column] > 0.6 else "black"
            place = left + cell * column + cell // 2, center
            draw.text(place, text.format(values[row, column]), color, font, anchor="mm")
    return np.asarray(canvas)


def curve(x: Sequence[float], y: Sequence[float], mark: float | None = None) -> Image:
    """Return y over a logarithmic x axis as lines; `mark` is an x at which a line is drawn."""
    width, height, left, top = 640, 360, 70, 20
    canvas, font = Pillow.new("RGB", (width, height), "white"), ImageFont.load_default(_TEXT)
    draw = ImageDraw.Draw(canvas)
    points = [(math.log10(a), b) for a, b in zip(x, y, strict=True) if math.isfinite(b)]
    if not points:
        return np.asarray(canvas)
    (x0, x1), (y0, y1) = ((min(values), max(values)) for values in zip(*points, strict=True))
    right, bottom = (width - left - 20) / max(x1 - x0, 1e-12), height - 2 * top
    up = (bottom - top) / max(y1 - y0, 1e-12)
    places = [(left + (a - x0) * right, bottom - (b - y0) * up) for a, b in points]
    draw.line(places, (30, 90, 200), 2)
    for power in range(math.ceil(x0), math.floor(x1) + 1):
        draw.text((left + (power - x0) * right, bottom), f"1e{power}", BLACK, font, anchor="ma")
    for value in (y0, y1):
        draw.text((left - _GAP, bottom - (value - y0) * up), f"{value:.4g}", BLACK, font, "rm")
    if mark is not None:
        at = left + (math.log10(mark) - x0) * right
        draw.line((at, top, at, bottom), WRONG, 2)
    return np.asarray(canvas)


def overlay(image: Tensor, mask: Tensor, classes: int) -> Tensor:
    """Return an image with each class but the first in a color over it; unknown ones are grey."""
    hues = [colorsys.hsv_to_rgb(index / classes, 1, 1) for index in range(1, classes)]
    colors = [(int(255 * r), int(255 * g), int(255 * b)) for r, g, b in hues]
    layers = [mask == index for index in range(1, classes)] + [(mask < 0) | (mask >= classes)]
    painted: Tensor = draw_segmentation_masks(image, torch.stack(layers), 0.6, [*colors, GREY])
    return painted
