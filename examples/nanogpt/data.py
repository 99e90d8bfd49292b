"""Windows from anywhere in a text, with replacement: nanoGPT's batches."""

from typing import Any

import torch

from regimen.data.text import StandardLibraryText


class RandomWindows(StandardLibraryText):
    """Windows of `context` characters, and the next character at each position.

    Where a sample begins is drawn anew each time, uniformly over the whole text; the loader keys
    the draw by seed, epoch and sample. An epoch has as many windows as the text has room for.
    """

    def __getitem__(self, index: int) -> Any:
        start = int(torch.randint(len(self.tokens) - self.context, ()))
        window = self.tokens[start : start + self.context + 1]
        return window[:-1], window[1:]
