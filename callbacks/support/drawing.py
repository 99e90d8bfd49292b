"""Drawings made of pixels: sheets of pictures, matrices and curves."""

from __future__ import annotations

import functools
import io
import math
import struct
import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image as Pillow
from PIL import ImageDraw, ImageFont
from torch import Tensor

from trainer.media import Image

Color = tuple[int, int, int]
BLACK, GREY, WHITE = (0, 0, 0), (120, 120, 120), (255, 255, 255)
RIGHT, WRONG = (0, 120, 0), (190, 0, 0)
_LIGHT = (225, 225, 225)
_TILE = 48  # pixels that a small picture is enlarged to, at least
_LINE, _LETTER = 14, 6  # height of a line of text, width of a letter, about
_WIDEST = 16 * _LETTER  # of captions
_GAP = 4


def is_picture(inputs: object) -> bool:
    """Return whether a batch's inputs are images: [n, 1 or 3, H, W]."""
    return isinstance(inputs, Tensor) and inputs.ndim == 4 and inputs.shape[1] in (1, 3)


def pixels(images: Tensor) -> NDArray[np.uint8]:
    """Return images [n, C, H, W] of any range as [n, H, W, 3], from their darkest value of all to
    the brightest.
    """
    values = images.detach().float().cpu().numpy()
    low, high = values.min(), values.max()
    shares = np.nan_to_num((values - low) / max(high - low, 1e-12)).clip(0, 1)
    colors = (shares * 255 + 0.5).astype(np.uint8).transpose(0, 2, 3, 1)
    return np.broadcast_to(colors, (*colors.shape[:3], 3))


def sheet(
    images: Sequence[Image] | NDArray[np.uint8],
    captions: Sequence[str] = (),
    colors: Sequence[Color] = (),
    columns: int = 8,
) -> Image:
    """Return images of one size side by side, small ones enlarged, each above its caption.

    The lines of a caption are cut to the width of an image, or to 16 letters.
    """
    factor = max(1, math.ceil(_TILE / max(images[0].shape[:2])))
    large = np.stack(images).repeat(factor, 1).repeat(factor, 2)  # type: ignore[arg-type]
    count, height, width, _ = large.shape
    columns = min(columns, count)
    texts = [caption.split("\n") for caption in captions]
    room = max(width, min(_WIDEST, _LETTER * max((len(t) for ts in texts for t in ts), default=0)))
    lines = max(map(len, texts), default=0)
    step_x, step_y = room + _GAP, height + _GAP + lines * _LINE
    rows = math.ceil(count / columns)
    cells = np.full((rows, step_y, columns, step_x, 3), 255, np.uint8)
    for row in range(rows):
        part = large[row * columns : (row + 1) * columns]
        cells[row, _GAP : _GAP + height, : len(part), _GAP : _GAP + width] = part.swapaxes(0, 1)
    canvas = cells.reshape(rows * step_y, columns * step_x, 3)
    for index, text in enumerate(texts):
        x, y = _GAP + index % columns * step_x, _GAP + index // columns * step_y + height
        for place, line in enumerate(text):
            color = colors[index] if colors else BLACK
            _write(canvas, (x, y + place * _LINE), line[: room // _LETTER], color)
    return canvas


def matrix(values: NDArray[np.float64], names: Sequence[str], text: str = "{:.0f}") -> Image:
    """Return a square matrix as shaded cells; rows are labels, columns are predictions.

    Values are written into the cells where there are at most 20 classes.
    """
    count, numbers = len(values), len(values) <= 20
    written = [[text.format(v) if v and numbers else "" for v in row] for row in values.tolist()]
    longest = max((len(text) for row in written for text in row), default=0)
    widest = max((len(name) for name in names), default=0)
    cell = max(24, 7 * longest, 7 * min(widest, 6)) if numbers else max(6, 720 // count)
    left, top = 2 * _GAP + 7 * min(widest, 12), 3 * _LINE + _GAP
    shares = values / max(float(values.max(initial=0.0)), 1e-12)
    canvas = np.full(
        (top + count * cell + _GAP, max(left + count * cell + _GAP, 130), 3), 255, "u1"
    )
    _shade(canvas[top:, left:], shares, cell)
    for row, column in zip(*np.nonzero(values), strict=True) if numbers else ():
        x, y = left + column * cell + cell // 2, top + row * cell + cell // 2
        color, (red, green, blue) = WHITE if shares[row, column] > 0.6 else BLACK, canvas[y, x]
        shade = int(red), int(green), int(blue)
        _write(canvas, (x, y), written[row][column], color, (0.5, 0.5), shade)
    for index, name in enumerate(names if cell >= 12 else ()):
        center = index * cell + cell // 2
        _write(canvas, (left - _GAP, top + center), name[:12], BLACK, (1, 0.5))
        _write(canvas, (left + center, top), name[: cell // _LETTER], BLACK, (0.5, 1))
    _write(canvas, (_GAP, 0), "rows: labels", GREY)
    _write(canvas, (_GAP, _LINE), "columns: predictions", GREY)
    return canvas


def _shade(canvas: Image, shares: NDArray[np.float64], cell: int) -> None:
    """Paint the cells of a matrix, the darker the larger their share, and lines between them."""
    size = len(shares) * cell
    shades = np.stack([255 - 215 * shares, 255 - 150 * shares, np.full_like(shares, 255)], 2)
    canvas[:size, :size] = shades.astype(np.uint8).repeat(cell, 0).repeat(cell, 1)
    canvas[: size + 1 : cell, : size + 1] = _LIGHT
    canvas[: size + 1, : size + 1 : cell] = _LIGHT


def _write(
    canvas: Image,
    place: tuple[int, int],
    text: str,
    color: Color,
    anchor: tuple[float, float] = (0, 0),
    background: Color = WHITE,
) -> None:
    """Write a line of text; `anchor` is the part of it that is to the left of and above `place`."""
    line = _line(text, color, background)
    x = max(0, place[0] - int(anchor[0] * line.shape[1]))
    y = max(0, place[1] - int(anchor[1] * _LINE))
    area = canvas[y : y + _LINE, x : x + line.shape[1]]
    area[:] = line[: area.shape[0], : area.shape[1]]


@functools.lru_cache(1000)  # most lines come again: names, small numbers
def _line(text: str, color: Color, background: Color) -> Image:
    """Return a line of text as an image, [_LINE, width, 3]."""
    letters = [_letter(letter) for letter in text] or [np.zeros((_LINE, 0, 1), np.float32)]
    below, above = np.array(background, np.float32), np.array(color, np.float32)
    return (below + (above - below) * np.concatenate(letters, 1)).astype(np.uint8)


@functools.lru_cache(1000)  # to draw a text anew costs ten times as much as to paste its letters
def _letter(letter: str) -> NDArray[np.float32]:
    """Return how much of each pixel a letter covers, [_LINE, width, 1]."""
    mask, (left, top) = _font().getmask2(letter, "L", anchor="la")
    width, height = mask.size
    # `np.asarray` of an image has Pillow import its file formats: 5 ms.
    found = np.array(list(mask), np.float32).reshape(height, width) / 255
    covered = np.zeros((_LINE, max(math.ceil(_font().getlength(letter)), left + width)), np.float32)
    part = found[: _LINE - top, max(0, -left) :]
    covered[top : top + len(part), max(0, left) : max(0, left) + part.shape[1]] = part
    return covered[..., None]


@functools.cache
def _font() -> Any:
    return ImageFont.load_default(11)


def curve(
    x: Sequence[float], y: Sequence[float], mark: float | None = None, title: str = ""
) -> Image:
    """Plot y over a logarithmic x axis; `mark` is an x at which a line is drawn."""
    width, height, left, bottom, top = 640, 360, 70, 30, 24
    canvas = Pillow.new("RGB", (width, height), "white")
    draw, font = ImageDraw.Draw(canvas), _font()
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
        draw.line((tick, top, tick, height - bottom), _LIGHT)
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


def png(image: Image) -> bytes:
    """Return an image as a PNG file.

    Drawings are flat, and each row is stored as its difference from the one above: half the cost of
    Pillow's search for the best way, at the same size, and none of its imports.
    """
    height, width = image.shape[:2]
    rows = np.empty((height, 1 + 3 * width), np.uint8)
    rows[:, 0] = 2  # "Up"
    rows[:, 1:] = image.reshape(height, -1)
    rows[1:, 1:] -= rows[:-1, 1:].copy()
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)  # 8 bits of RGB
    chunks = (b"IHDR", header), (b"IDAT", zlib.compress(rows.data, 2)), (b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + b"".join(_chunk(*chunk) for chunk in chunks)


def _chunk(kind: bytes, content: bytes) -> bytes:
    checksum = zlib.crc32(content, zlib.crc32(kind))
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", checksum)
