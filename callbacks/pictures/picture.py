"""The base class of pictures of a validation, and functions that draw images and matrices."""

import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image as Pillow
from PIL import ImageDraw, ImageFont
from torch import Tensor, nn
from torchvision.utils import make_grid

from regimen.callbacks.support import check_least, is_due
from regimen.conf.errors import one_line
from regimen.trainer.callback import Callback
from regimen.trainer.media import Image
from regimen.trainer.runs.status import INFERENCE, RunDirectoryError, read_json
from regimen.trainer.tasks.supervised import LABELS, Supervised, pair_of
from regimen.trainer.trainer import Trainer

# Pixels.
_MIN_TILE = 96  # small pictures are enlarged to it
_FONT_SIZE = 14
_GAP = 4  # between pictures
_MAX_LETTERS = 14  # of the name of a class
_MAX_NAMED = 20  # classes of a matrix whose names and values are written


class ValidationPicture(Callback):
    """Base class: collect from the batches of a validation, and show at its end.

    `every_n_validations`: null for the 1st, 4th, 16th... and the last, which costs a long run
    hardly any time. `collect` gets each batch on the device, and must not wait for it; it appends
    tuples of tensors to `kept`. `show` is called on the main process after the last batch, with
    the tensors of all tuples concatenated, on the host.
    """

    persistent = ("count",)
    kinds: tuple[str, ...] = ()  # of `Task.output_kind` that can be shown
    on_main_only = True  # else all processes collect

    def __init__(self, count: int = 16, every_n_validations: int | None = None) -> None:
        check_least(count=count, every_n_validations=every_n_validations)
        self.wanted = count
        self._every = every_n_validations
        self.count = 0  # validations so far
        self._due = False
        self.kept = list[Any]()

    def collect(self, trainer: Trainer, batch: Any, output: Any) -> None:
        """Keep something of a batch in `kept`."""

    def show(self, trainer: Trainer, *parts: Tensor) -> None:
        """Log what all processes kept."""

    def fits(self, trainer: Trainer) -> bool:
        """Return whether the outputs of the task can be shown."""
        return trainer.task.output_kind in self.kinds

    def on_validation_start(self, trainer: Trainer) -> None:
        """Decide whether this validation is shown."""
        self.kept = []  # of a validation that a signal ended, and that begins again here
        is_last = self._every is None and trainer.done
        self._due = self.fits(trainer) and (is_last or is_due(self.count + 1, self._every))

    def on_validation_batch(self, trainer: Trainer, batch: Any, output: Any) -> None:
        """Collect from a batch that is shown."""
        if self._due and output is not None and (trainer.is_main or not self.on_main_only):
            if isinstance(batch, Mapping) and LABELS in batch:
                batch = pair_of(batch)
            self.collect(trainer, batch, output)

    def on_validation_end(self, trainer: Trainer, metrics: Mapping[str, float]) -> None:
        """Show what was collected."""
        self.count += 1
        if self._due:
            self.finish(trainer)
        self.kept = []

    def finish(self, trainer: Trainer) -> None:
        """Join what the processes kept, and show it."""
        own = _joined(self.kept)
        if self.on_main_only:
            parts = own
        else:
            # A collective. A process that had no sample has no parts.
            parts = _joined([p for p in trainer.group.gather_data(own) if p])
        if trainer.is_main and parts:
            self.show(trainer, *parts)


def _joined(entries: Sequence[Sequence[Tensor]]) -> list[Tensor]:
    """Concatenate the first tensors of all entries, the second ones and so on, on the host.

    Waits for the device.
    """
    return [torch.cat(tensors).cpu() for tensors in zip(*entries, strict=True)]


def class_names(trainer: Trainer, count: int) -> list[str]:
    """Return the names of the classes, or their numbers if the data have no names."""
    names: Any = None
    if trainer.run_dir is not None:
        with suppress(RunDirectoryError):
            names = read_json(trainer.run_dir / INFERENCE).get("classes")
    if not isinstance(names, list) or len(names) != count:
        names = range(count)
    return [one_line(name)[:_MAX_LETTERS] for name in names]


def labels_of(trainer: Trainer, target: Tensor) -> Tensor:
    """Return the class of each sample, the largest one of a soft target; below 0: none counts."""
    if isinstance(trainer.task, Supervised):
        return trainer.task.labels_of(target)
    if target.is_floating_point():
        return target.argmax(1)
    return target


def code_block(text: str) -> str:
    """Return text as a code block in Markdown."""
    return "\n".join(f"    {line}" for line in text.splitlines())


def is_picture(inputs: object) -> bool:
    """Return whether a batch's inputs are images: [n, 1 or 3, H, W]."""
    return isinstance(inputs, Tensor) and inputs.ndim == 4 and inputs.shape[1] in (1, 3)


def pixels(images: Tensor) -> Tensor:
    """Return images [n, C, H, W] of any range as uint8 [n, 3, H, W] on the host.

    The darkest value of all is black, the brightest white. Waits for the device.
    """
    values = images.detach().float().cpu()
    low, high = values.aminmax()
    shares = ((values - low) / (high - low).clamp(min=1e-12)).nan_to_num()
    return (shares * 255 + 0.5).byte().expand(-1, 3, -1, -1)


def enlarged(images: Tensor, least: int) -> Tensor:
    """Return images [..., H, W]; where both are below `least`, enlarged by a whole number."""
    factor = max(1, math.ceil(least / max(images.shape[-2:])))
    return images.repeat_interleave(factor, -2).repeat_interleave(factor, -1)


def sheet(
    images: Tensor, captions: Sequence[str] = (), colors: Sequence[Any] = (), columns: int = 4
) -> Image:
    """Return images [n, C, H, W] side by side, small ones enlarged, above captions.

    Images that are not uint8 may have any range: see `pixels`. `colors`: one for each caption.
    """
    if images.dtype != torch.uint8:
        images = pixels(images)
    large = enlarged(images, _MIN_TILE)
    font = ImageFont.load_default(_FONT_SIZE)
    text_width, text_height = _largest_text(captions, font)
    missing_width = max(0, text_width - large.shape[3])
    tiles = nn.functional.pad(large, (0, missing_width, 0, text_height), value=255)
    grid = make_grid(tiles, nrow=columns, padding=_GAP, pad_value=255)
    canvas = Pillow.fromarray(grid.permute(1, 2, 0).contiguous().numpy())
    draw = ImageDraw.Draw(canvas)
    height, width = tiles.shape[2:]
    for index, caption in enumerate(captions):
        row, column = divmod(index, columns)
        x = _GAP + column * (width + _GAP)
        y = (row + 1) * (height + _GAP) - text_height
        draw.text((x, y), caption, colors[index] if colors else "black", font)
    return np.asarray(canvas)


def _largest_text(captions: Sequence[str], font: Any) -> tuple[int, int]:
    """Return the largest width and the largest height of captions in pixels."""
    draw = ImageDraw.Draw(Pillow.new("L", (1, 1)))
    width = 0
    height = 0
    for caption in captions:
        _, _, right, bottom = draw.multiline_textbbox((0, 0), caption, font)
        width = max(width, math.ceil(right))
        height = max(height, math.ceil(bottom))
    return width, height


def matrix(values: NDArray[np.float64], names: Sequence[str], text: str = "{:.0f}") -> Image:
    """Return a square matrix as shaded cells; rows are labels, columns are predictions.

    Names and values are written where there are at most 20 classes.
    """
    count = len(values)
    font = ImageFont.load_default(_FONT_SIZE)
    # Names are written along the top and the left edge, as wide as the longest of them.
    if count <= _MAX_NAMED:
        edge = _GAP + math.ceil(max(font.getlength(name) for name in names))
        cell = max(48, edge)
    else:
        edge = _GAP + _FONT_SIZE
        cell = max(6, 720 // count)
    shares = values / max(float(values.max()), 1e-12)
    shades = 255 - shares[..., None] * (215, 150, 0)  # from white to blue
    size = cell * count
    cells = Pillow.fromarray(shades.astype(np.uint8))
    canvas = Pillow.new("RGB", (edge + size, edge + size), "white")
    canvas.paste(cells.resize((size, size), Pillow.Resampling.NEAREST), (edge, edge))
    if count > _MAX_NAMED:
        return np.asarray(canvas)

    draw = ImageDraw.Draw(canvas)
    centers = [edge + cell * index + cell // 2 for index in range(count)]
    for name, center in zip(names, centers, strict=True):
        draw.text((edge - _GAP, center), name, "black", font, anchor="rm")
        draw.text((center, edge - _GAP), name, "black", font, anchor="md")
    for row, column in np.argwhere(values):
        color = "white" if shares[row, column] > 0.6 else "black"
        number = text.format(values[row, column])
        draw.text((centers[column], centers[row]), number, color, font, anchor="mm")
    return np.asarray(canvas)
