"""What callbacks share that show images, histograms, texts, figures and curves alike."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from callbacks.support.drawing import drawn
from trainer.callback import Callback
from trainer.media import Histogram, Image, PRCurve

if TYPE_CHECKING:
    from trainer.trainer import Trainer

Shown = Image | Histogram | PRCurve | str


class Shows(Callback):
    """Base class of callbacks with one method for all that a run shows besides scalars."""

    def on_shown(self, trainer: Trainer, name: str, value: Shown) -> None:
        """Receive an image, a histogram, a text or a curve; a figure comes as an image."""
        raise NotImplementedError

    def on_image(self, trainer: Trainer, name: str, image: Image) -> None:
        """Show an image."""
        self.on_shown(trainer, name, image)

    def on_histogram(self, trainer: Trainer, name: str, histogram: Histogram) -> None:
        """Show a histogram."""
        self.on_shown(trainer, name, histogram)

    def on_text(self, trainer: Trainer, name: str, text: str) -> None:
        """Show a text."""
        self.on_shown(trainer, name, text)

    def on_figure(self, trainer: Trainer, name: str, figure: Any) -> None:
        """Show a figure of matplotlib's as an image."""
        self.on_shown(trainer, name, drawn(figure))

    def on_pr_curve(self, trainer: Trainer, name: str, curve: PRCurve) -> None:
        """Show precision and recall over thresholds."""
        self.on_shown(trainer, name, curve)
