"""What pictures share: when one is due, what a validation answered, and how it is drawn."""

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
from regimen.trainer.callback import Callback, Image
from regimen.trainer.runs.status import INFERENCE, RunDirectoryError, read_json
from regimen.trainer.tasks.supervised import Supervised
from regimen.trainer.trainer import Trainer

_TILE = 96  # pixels that a small picture is enlarged to, at least
_TEXT, _GAP = 14, 4  # pixels: size of letters, between pictures
_LETTERS = 14  # of the name of a class


class ValidationPicture(Callback):
    """Base class: collect from the batches of a validation, and show at its end.

    `every_n_validations`: null for the 1st, 4th, 16th... and the last, which costs a long run
    hardly any time. `collect` gets each batch on the device and must not wait for it; `show` is
    called on the main process after the last batch with what was kept, joined, on the host.
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
        self.kept = list[Sequence[Tensor]]()

    def collect(self, trainer: Trainer, batch: Any, output: Any) -> None:
        """Keep something of a batch in `kept`."""

    def show(self, trainer: Trainer, *parts: Tensor) -> None:
        """Log what all processes kept."""

    def fits(self, trainer: Trainer) -> bool:
        """Return whether the outputs of the task can be shown."""
        return trainer.task.output_kind in self.kinds

    def on_validation_start(self, trainer: Trainer) -> None:
        """Decide whether this validation is shown."""
        regular = is_due(self.count + 1, self._every)
        self._due = self.fits(trainer) and (regular or (self._every is None and trainer.done))

    def on_validation_batch(self, trainer: Trainer, batch: Any, output: Any) -> None:
        """Collect from a batch that is shown."""
        if self._due and output is not None and (trainer.is_main or not self.on_main_only):
            self.collect(trainer, batch, output)

    def on_validation_end(self, trainer: Trainer, metrics: Mapping[str, float]) -> None:
        """Show what was collected."""
        self.count += 1
        if self._due:
            self.finish(trainer)
        self.kept = []

    def finish(self, trainer: Trainer) -> None:
        """Join what the processes kept, and show it."""
        own = [torch.cat(parts).cpu() for parts in zip(*self.kept, strict=True)]
        found = [own] if self.on_main_only else trainer.group.gather_data(own)
        joined = [torch.cat(parts) for parts in zip(*filter(None, found), strict=True)]
        if trainer.is_main and joined:
            self.show(trainer, *joined)


def class_names(trainer: Trainer, count: int) -> list[str]:
    """Return the names of the classes, or their numbers if the data have no names."""
    names: Any = None
    if trainer.run_dir is not None:
        with suppress(RunDirectoryError):
            names = read_json(trainer.run_dir / INFERENCE).get("classes")
    known = isinstance(names, list) and len(names) == count
    return [one_line(name)[:_LETTERS] for name in (names if known else range(count))]


def labels_of(trainer: Trainer, target: Tensor) -> Tensor:
    """Return the class of each sample, below 0 where none counts; of soft targets the largest."""
    if isinstance(trainer.task, Supervised):
        return trainer.task.labels_of(target)
    if target.is_floating_point():
        return target.argmax(1)
    return target.argmax(1) if target.is_floating_point() else target


def code_block(text: str) -> str:
    """Return text as a code block in Markdown."""
    return "\n".join(f"    {line}" for line in text.splitlines())


def is_picture(inputs: object) -> bool:
    """Return whether a batch's inputs are images: [n, 1 or 3, H, W]."""
    return isinstance(inputs, Tensor) and inputs.ndim == 4 and inputs.shape[1] in (1, 3)


def pixels(images: Tensor) -> Tensor:
    """Return images [n, C, H, W] of any range as uint8 [n, 3, H, W] on the host.

    The darkest value of all is black, the brightest white.
    """
    values = images.detach().float().cpu()
    low, high = values.aminmax()
    shares = ((values - low) / (high - low).clamp(min=1e-12)).nan_to_num()
    return (shares * 255 + 0.5).byte().expand(-1, 3, -1, -1)


def sheet(
    images: Tensor, captions: Sequence[str] = (), colors: Sequence[Any] = (), columns: int = 4
) -> Image:
    """Return images [n, C, H, W] side by side, small ones enlarged, above captions.

    Those that are not uint8 have any range, as `pixels` says.
    """
    factor = max(1, math.ceil(_TILE / max(images.shape[2:])))
    images = images if images.dtype == torch.uint8 else pixels(images)
    large = images.repeat_interleave(factor, 2).repeat_interleave(factor, 3)
    font, ruler = ImageFont.load_default(_TEXT), ImageDraw.Draw(Pillow.new("L", (1, 1)))
    sizes = [ruler.multiline_textbbox((0, 0), caption, font)[2:] for caption in captions]
    wide, below = (math.ceil(max(part)) for part in zip(*sizes, (0, 0), strict=True))
    tiles = nn.functional.pad(large, (0, max(0, wide - large.shape[3]), 0, below), value=255)
    grid = make_grid(tiles, nrow=columns, padding=_GAP, pad_value=255)
    canvas = Pillow.fromarray(grid.permute(1, 2, 0).contiguous().numpy())
    draw, (height, width) = ImageDraw.Draw(canvas), tiles.shape[2:]
    for index, caption in enumerate(captions):
        row, column = divmod(index, columns)
        place = _GAP + column * (width + _GAP), (row + 1) * (height + _GAP) - below
        draw.text(place, caption, colors[index] if colors else "black", font)
    return np.asarray(canvas)


def matrix(values: NDArray[np.float64], names: Sequence[str], text: str = "{:.0f}") -> Image:
    """Return a square matrix as shaded cells; rows are labels, columns are predictions.

    Names and values are written where there are at most 20 classes.
    """
    count, font = len(values), ImageFont.load_default(_TEXT)
    names = names if count <= 20 else []
    edge = _GAP + math.ceil(max(map(font.getlength, names), default=_TEXT))
    cell = max(48, edge) if names else max(6, 720 // count)
    shares = (values / max(float(values.max(initial=0.0)), 1e-12))[..., None]
    shades = Pillow.fromarray((255 - shares * (215, 150, 0)).astype(np.uint8))
    canvas = Pillow.new("RGB", (edge + cell * count,) * 2, "white")
    canvas.paste(shades.resize((cell * count,) * 2, Pillow.Resampling.NEAREST), (edge, edge))
    draw = ImageDraw.Draw(canvas)
    for row, name in enumerate(names):
        along = edge + cell * row + cell // 2
        draw.text((edge - _GAP, along), name, "black", font, anchor="rm")
        draw.text((along, edge - _GAP), name, "black", font, anchor="md")
        for column in np.nonzero(values[row])[0].tolist():
            color = "white" if shares[row, column] > 0.6 else "black"
            place = edge + cell * column + cell // 2, along
            draw.text(place, text.format(values[row, column]), color, font, anchor="mm")
    return np.asarray(canvas)
