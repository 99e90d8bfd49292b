"""Text that a language model writes after prompts, a token at a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from conf.errors import ConfigError, Problem
from conf.schema import Config
from data.text import Prompts
from trainer.assembly.data import build_pipeline
from trainer.inference.facts import InferenceFacts
from trainer.rng import derived

Sampling = Literal["greedy", "random"]


@dataclass(frozen=True, slots=True)
class Generation:
    """How the next token is chosen: the likeliest (greedy), or drawn from the `top_k` likeliest.

    Draws are keyed by `seed` and the number of the prompt alone: neither the batch nor the number
    of workers or processes changes them.
    """

    max_new_tokens: int = 200
    sampling: Sampling = "greedy"
    temperature: float = 1.0
    top_k: int | None = None  # None: all
    seed: int = 0

    def __call__(self, logits_of: Callable[[Tensor], Tensor], batch: Any) -> Tensor:
        """Return the new tokens [n, max_new_tokens].

        logits_of: maps tokens [n, length] to logits [n, vocabulary, length], each of which depends
        on its own and earlier positions only. batch: what `data.text.Prompts` returns, collated.
        """
        window, lengths, numbers = batch
        draws = self._draws(numbers.tolist())
        rows = torch.arange(len(window), device=window.device)
        longest = int(lengths.max())
        context = window.shape[1]
        found = []
        for step in range(self.max_new_tokens):
            logits = logits_of(window[:, :longest])[rows, :, lengths - 1]
            token = self._choose(logits, draws[:, step])
            found.append(token)
            full = lengths == context
            window = torch.where(full[:, None], window.roll(-1, 1), window)
            place = lengths.clamp(max=context - 1)
            window = window.scatter(1, place[:, None], token[:, None])
            lengths = place + 1
            longest = min(longest + 1, context)
        return torch.stack(found, 1)

    def _draws(self, numbers: Sequence[int]) -> Tensor:
        """Return a number from 0 to 1 for each new token of each prompt, on the host."""
        if self.sampling == "greedy":
            return torch.zeros(len(numbers), self.max_new_tokens)
        rows = []
        for number in numbers:
            generator = torch.Generator().manual_seed(derived(self.seed, "generate", number))
            rows.append(torch.rand(self.max_new_tokens, generator=generator, dtype=torch.float64))
        return torch.stack(rows)

    def _choose(self, logits: Tensor, draw: Tensor) -> Tensor:
        """Return a token for each row of logits [n, vocabulary]."""
        if self.sampling == "greedy":
            return logits.argmax(1)
        scaled = logits.double() / self.temperature
        if self.top_k is not None and self.top_k < scaled.shape[1]:
            least = scaled.topk(self.top_k, dim=1).values[:, -1:]
            scaled = scaled.masked_fill(scaled < least, -torch.inf)
        shares = scaled.softmax(1).cumsum(1)
        # The share that the draw falls into; one of probability 0 has no width.
        wanted = draw.to(shares)[:, None] * shares[:, -1:]
        return (shares <= wanted).sum(1).clamp(max=shares.shape[1] - 1)


def prompts_for(
    facts: InferenceFacts, config: Config, names: Sequence[str], texts: Sequence[str]
) -> Prompts:
    """Return prompts as the samples of a run that continues text. Raises ConfigError."""
    form = facts.inputs
    if form["kind"] != "text" or facts.outputs["kind"] != "text" or not facts.classes:
        hint = "task=language_model does on data=docstrings and on the .txt files of data=tokens; "
        hint += "token files of numbers do not hold the tokenizer that made them"
        raise ConfigError(Problem("run", "its task and data do not continue text", hint))
    transform = build_pipeline(config, "eval")
    return Prompts(names, texts, facts.classes, form["context"], transform, form["encoding"])
