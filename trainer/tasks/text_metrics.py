"""Metrics of the texts that a model writes: each answer is compared with a reference."""

import math
import re
from abc import ABC, abstractmethod
from collections.abc import Sequence
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from regimen.trainer.errors import ModelError


def takes_texts(metric: Any) -> bool:
    """Return whether a metric is updated with answers and references, both lists of texts.

    It says so by an attribute `takes_texts`; the metrics of torchmetrics.text do, but for
    perplexity.
    """
    stated = getattr(metric, "takes_texts", None)
    if stated is not None:
        return bool(stated)
    modules = {kind.__module__ for kind in type(metric).mro()}
    is_of_text = any(name.startswith("torchmetrics.text.") for name in modules)
    return is_of_text and "torchmetrics.text.perplexity" not in modules


class AnswerScore(ABC):
    """Base class: the mean of a score of each answer. Larger is better.

    The scores are kept one by one, and their sum is rounded once: the mean is the same to the last
    bit for any number of processes.
    """

    takes_texts = True
    higher_is_better = True

    def __init__(self) -> None:
        self._scores: list[float] = []

    @abstractmethod
    def score(self, answer: str, reference: str) -> float:
        """Return the score of one answer."""

    def reset(self) -> None:
        """Forget all scores."""
        self._scores = []

    def update(self, answers: Sequence[str], references: Sequence[str]) -> None:
        """Add the scores of some answers."""
        for answer, reference in zip(answers, references, strict=True):
            self._scores.append(self.score(answer, reference))

    def merge_state(self, others: Sequence["AnswerScore"]) -> None:
        """Add the scores of other processes."""
        for other in others:
            self._scores += other._scores

    def compute(self) -> float:
        """Return the mean; NaN without an answer."""
        if not self._scores:
            return math.nan
        return math.fsum(self._scores) / len(self._scores)


class ExactMatch(AnswerScore):
    """The share of answers that are the reference, but for white space at both ends."""

    def score(self, answer: str, reference: str) -> float:
        """Return 1 if both are the same text, else 0."""
        return float(answer.strip() == reference.strip())


class RougeL(AnswerScore):
    """The F-measure of the longest common subsequence of words (Lin, ROUGE, 2004), by rouge-score.

    Words are runs of letters and digits of any script, in small letters, without stemming. On
    ASCII these are the words of rouge-score, which drops all other letters.
    """

    def __init__(self) -> None:
        super().__init__()
        # Found out before a training, at the end of whose first epoch it would be missed.
        if find_spec("rouge_score") is None:
            raise ModelError(
                "ROUGE-L needs the package rouge-score, which is not installed: "
                "pip install 'torch-regimen[rouge]'"
            )
        self._scorer: Any = None

    def score(self, answer: str, reference: str) -> float:
        """Return the F-measure, from 0 to 1."""
        if self._scorer is None:
            scorer = import_module("rouge_score.rouge_scorer")  # slow: it imports nltk
            self._scorer = scorer.RougeScorer(["rougeL"], tokenizer=_Words())
        return float(self._scorer.score(reference, answer)["rougeL"].fmeasure)

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for other processes: the scores alone."""
        return {**vars(self), "_scorer": None}


class _Words:
    """Splits texts into words, as rouge-score asks for it."""

    def tokenize(self, text: str) -> list[str]:
        """Return the words of a text."""
        return re.findall(r"[^\W_]+", text.lower())
