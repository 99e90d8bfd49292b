"""The options of clipping under the name by which scripts outside know them."""

from trainer.options import Clipping

__all__ = ["Clipping"]
