"""The word language model by a loop of its own, as PyTorch's example has it.

`python -m examples.word_language_model.by_hand SEED` trains on the same text and prints the
perplexity on the test text.
"""

import copy
import math
import sys

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from examples.word_language_model.data import Words
from examples.word_language_model.model import WordLSTM

BPTT = 35


def train_epoch(model: WordLSTM, text: Tensor, lr: float, clip: float = 0.25) -> None:
    """Train on the columns of a text (columns, length), one window after the other."""
    model.train()
    hidden = None
    for start in range(0, text.shape[1] - 1, BPTT):
        words, following = _window(text, start)
        if hidden is not None:
            hidden = hidden[0].detach(), hidden[1].detach()
        model.zero_grad()
        logits, hidden = model(words, hidden)
        loss = cross_entropy(logits.flatten(0, 1), following.flatten())
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(model.parameters(), clip)
        with torch.no_grad():
            for parameter in model.parameters():
                assert parameter.grad is not None
                parameter.sub_(lr * parameter.grad)


@torch.no_grad()
def mean_loss(model: WordLSTM, text: Tensor) -> float:
    """Return the mean over all words but the first of each column."""
    model.eval()
    hidden = None
    total = 0.0
    for start in range(0, text.shape[1] - 1, BPTT):
        words, following = _window(text, start)
        logits, hidden = model(words, hidden)
        loss = cross_entropy(logits.flatten(0, 1), following.flatten())
        total += loss.item() * words.shape[1]
    return total / (text.shape[1] - 1)


def train_by_hand(
    model: WordLSTM, train: Tensor, val: Tensor, epochs: int = 6, lr: float = 20.0
) -> WordLSTM:
    """Train and return the network of the best validation."""
    best_loss = math.inf
    best = model
    for epoch in range(epochs):
        train_epoch(model, train, lr)
        loss = mean_loss(model, val)
        print(f"epoch {epoch + 1}: val/loss {loss:.4f}", file=sys.stderr, flush=True)
        if loss < best_loss:
            best_loss = loss
            best = copy.deepcopy(model)
        else:
            lr /= 4
    return best


def _window(text: Tensor, start: int) -> tuple[Tensor, Tensor]:
    window = text[:, start : start + BPTT + 1]
    return window[:, :-1], window[:, 1:]


def main() -> None:
    """Train and print the perplexity."""
    torch.manual_seed(int(sys.argv[1]))
    train = Words("train", columns=20)
    val = Words("val", columns=10)
    test = Words("test", columns=10)
    model = WordLSTM(len(train.classes))
    best = train_by_hand(model, train.text, val.text)
    print(f"test/perplexity {math.exp(mean_loss(best, test.text)):.2f}")


if __name__ == "__main__":
    main()
