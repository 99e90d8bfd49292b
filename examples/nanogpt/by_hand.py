"""nanoGPT's recipe by a loop of its own, with a small GPT for CPUs.

`python -m examples.nanogpt.by_hand SEED` trains on the same text and prints the loss on the text
for validation.
"""

import math
import sys
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from regimen.data.text import StandardLibraryText
from regimen.models.gpt import GPT

Batch = tuple[Tensor, Tensor]
BATCH_SIZE = 12
CONTEXT = 64
UPDATES = 2000


def random_batches(text: Tensor) -> Iterator[Batch]:
    """Yield windows of a text from random places, without an end."""
    while True:
        starts = torch.randint(len(text) - CONTEXT, (BATCH_SIZE,)).tolist()
        tokens = torch.stack([text[i : i + CONTEXT] for i in starts])
        following = torch.stack([text[i + 1 : i + 1 + CONTEXT] for i in starts])
        yield tokens, following


def rate(
    update: int, updates: int, warmup: int = 100, highest: float = 1e-3, lowest: float = 1e-4
) -> float:
    """Return the learning rate: a linear warm-up, then a half cosine to `lowest`."""
    if update < warmup:
        return highest * (update + 1) / (warmup + 1)
    progress = (update - warmup) / (updates - warmup)
    return lowest + 0.5 * (1 + math.cos(math.pi * progress)) * (highest - lowest)


def train_by_hand(model: GPT, batches: Iterable[Batch], updates: int, warmup: int = 100) -> None:
    """Train on the first `updates` batches."""
    parameters = list(model.parameters())
    groups = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": 0.1},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.99))
    for update, (tokens, following) in zip(range(updates), batches, strict=False):
        for group in optimizer.param_groups:
            group["lr"] = rate(update, updates, warmup)
        loss = mean_loss(model, tokens, following)
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if update % 200 == 0:
            print(f"update {update}: loss {loss.item():.4f}", file=sys.stderr, flush=True)


def mean_loss(model: GPT, tokens: Tensor, following: Tensor) -> Tensor:
    """Return the mean over all positions of windows (n, length)."""
    return cross_entropy(model(tokens).flatten(0, 1), following.flatten())


def main() -> None:
    """Train and print the loss on all windows of the text for validation."""
    torch.manual_seed(int(sys.argv[1]))
    train = StandardLibraryText("train", CONTEXT)
    val = StandardLibraryText("val", CONTEXT)
    model = GPT(len(train.classes), context=CONTEXT)
    train_by_hand(model, random_batches(train.tokens), UPDATES)
    windows = [val[index] for index in range(len(val))]
    tokens = torch.stack([window[0] for window in windows])
    following = torch.stack([window[1] for window in windows])
    with torch.no_grad():
        print(f"val/loss {mean_loss(model.eval(), tokens, following).item():.4f}")


if __name__ == "__main__":
    main()
