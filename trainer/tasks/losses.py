"""Losses: one torch loss module, or a weighted sum of several by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn

from conf.errors import Problem
from data.batch import least_of
from trainer.errors import ModelError
from trainer.task import SUM
from trainer.tasks.penalties import GradientPenalty

_REMEMBERED = 256  # batches whose denominators are known; an update has as many micro-batches
_CROSS_ENTROPIES = (nn.CrossEntropyLoss, nn.NLLLoss)


def vector(values: Sequence[float]) -> Tensor:
    """Return a list of numbers as a tensor, for arguments such as `weight` and `pos_weight`."""
    return torch.tensor(list(values), dtype=torch.float32)


class Term(nn.Module):
    """A weighted term of a sum of losses: `weight * loss(output, target)`."""

    def __init__(self, loss: nn.Module, weight: float = 1.0) -> None:
        super().__init__()
        self.loss = loss
        self.weight = weight


# Labels, how often they were changed in place, and their denominators.
_Known = tuple[Callable[[], Tensor | None], int | None, Mapping[str, Tensor | int]]
_NOTHING: _Known = (lambda: None, None, {})


@dataclass(frozen=True, slots=True)
class Losses:
    """Compute a loss, or several by name, and the denominators of their means.

    The `reduction` of a term is a mean over the samples, a sum over them, or one value for each.
    torch's cross entropy takes its mean over the labels other than `ignore_index`, weighted by
    their class weights.
    """

    terms: Mapping[str, Term]  # a loss without a name has the name ""
    single: nn.Module | None  # a loss that needs neither terms nor denominators
    counted: Sequence[str]  # terms whose denominators depend on the labels
    ignored: int | None = None  # `ignore_index` of the first cross entropy
    # What each update asks of the terms: what a penalty is taken with respect to, and sums.
    wrt: Mapping[str, str | None] = field(default_factory=dict)
    summed: Sequence[str] = ()
    _known: dict[int, _Known] = field(default_factory=dict)  # by the `id` of labels

    @classmethod
    def of(cls, loss: nn.Module | Mapping[str, nn.Module | None]) -> Losses:
        """Accept one loss module, or several by name (None is dropped), optionally as `Term`s."""
        named = loss if isinstance(loss, Mapping) else {"": loss}
        given = {name: module for name, module in named.items() if module is not None}
        terms = {n: m if isinstance(m, Term) else Term(m) for n, m in given.items()}
        if all(isinstance(t.loss, GradientPenalty) for t in terms.values()):
            raise ModelError("task.loss has only gradient penalties: add a loss on the output")
        for name, term in terms.items():
            smoothing = getattr(term.loss, "label_smoothing", 0.0)
            if smoothing < 0:  # which torch takes as none
                message = f"label_smoothing must be between 0.0 and 1.0, got {smoothing}"
                raise ModelError(Problem(f"task.loss.{name}".rstrip("."), message))
        counted = [name for name, term in terms.items() if _is_counted(term.loss)]
        simple = not counted and isinstance(loss, nn.Module) and not isinstance(loss, Term)
        simple = simple and _reduction(terms[""].loss) != "sum"
        single = loss if simple and isinstance(loss, nn.Module) else None
        entropies = [t.loss for t in terms.values() if isinstance(t.loss, _CROSS_ENTROPIES)]
        ignored = entropies[0].ignore_index if entropies else None
        wrt = {name: _wrt(term) for name, term in terms.items()}
        summed = [name for name, term in terms.items() if _reduction(term.loss) == "sum"]
        return cls(terms, single, counted, ignored, wrt, summed)

    @property
    def names(self) -> list[str]:
        """The losses that an evaluation reports; gradient penalties exist in training only."""
        named = [f"loss_{name}" for name, wrt in self.wrt.items() if name and not wrt]
        return ["loss", *named]

    def counting(self, target: Tensor) -> tuple[Tensor, Tensor | int]:
        """Return class labels, of which those that are ignored equal none, and how many count."""
        if target.is_floating_point():
            return target.argmax(1), target.shape[0]
        if self.ignored is None:
            return target, target.shape[0]
        count: Tensor | None = None
        for name, known in self.counts(target).items():
            if isinstance(known, int):
                return target, target.shape[0]
            if self._counts_labels(self.terms[name].loss):
                count = known
        if count is None:
            count = (target != self.ignored).count_nonzero()
        labels = target if self.ignored < 0 else target.where(target != self.ignored, -1)
        return labels, count

    def _counts_labels(self, loss: nn.Module) -> bool:
        """Return whether the denominator of a loss is the number of labels other than `ignored`."""
        assert isinstance(loss, _CROSS_ENTROPIES)
        return loss.weight is None and loss.ignore_index == self.ignored

    @property
    def modules(self) -> dict[str, nn.Module]:
        """The losses by name: `loss`, or `loss.<term>`."""
        return {f"loss.{name}" if name else "loss": t.loss for name, t in self.terms.items()}

    def counts(self, target: Tensor) -> Mapping[str, Tensor | int]:
        """Return the denominators for a batch of labels; a repeated call returns the same ones."""
        if not self.counted:
            return {}
        version = None if target.is_inference() else target._version  # changed in place since?
        labels, then, known = self._known.get(id(target), _NOTHING)
        if labels() is target and then == version:
            return known
        if len(self._known) >= _REMEMBERED:
            self._known.clear()
        found = {name: _count(self.terms[name].loss, target) for name in self.counted}
        self._known[id(target)] = ref(target), version, found
        return found

    def watched(self, inputs: Any) -> Any:
        """Return inputs that require a gradient, if a gradient penalty on inputs needs it."""
        if "inputs" not in self.wrt.values() or not torch.is_grad_enabled():
            return inputs
        if not isinstance(inputs, Tensor) or not inputs.is_floating_point():
            raise ModelError(
                "a gradient penalty on inputs needs inputs that are one floating-point tensor"
            )
        return inputs.detach().requires_grad_()

    def __call__(
        self, output: Any, target: Any, inputs: Any = None, model: nn.Module | None = None
    ) -> tuple[Tensor | dict[str, Tensor], Mapping[str, Any]]:
        """Return the loss, or its weighted terms by name, and the denominators.

        Gradient penalties need `inputs` (from `watched`) and `model`.
        """
        if self.single is not None:
            return _value(self.single, output, target), {}
        values = {}
        for name, term in self.terms.items():
            wrt = self.wrt.get(name)
            if not wrt:
                value = _value(term.loss, output, target)
                values[name] = value if term.weight == 1 else value * term.weight
            elif torch.is_grad_enabled():
                sources = [inputs] if wrt == "inputs" else _trained(model)
                values[name] = term.loss(output, target, sources) * term.weight
        counts: Mapping[str, Any] = self.counts(target)
        if self.summed:
            counts = {**counts, **{name: SUM for name in self.summed if name in values}}
        return values, counts


def by_place(output: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Flatten logits (n, classes, d...) and labels (n, d...) to (positions, classes), (positions).

    For labels of more than one dimension torch's losses have no deterministic kernel, and the one
    that they have is slower.
    """
    if output.ndim < 3 or target.is_floating_point():
        return output, target
    return output.movedim(1, -1).flatten(0, -2), target.flatten()


def _value(loss: nn.Module, output: Any, target: Any) -> Tensor:
    if not isinstance(loss, _CROSS_ENTROPIES) or output.ndim < 3 or target.is_floating_point():
        value: Tensor = loss(output, target)
        return value
    value = loss(*by_place(output, target))
    return value.view(target.shape) if value.ndim else value


def _wrt(term: Term) -> str | None:
    return term.loss.wrt if isinstance(term.loss, GradientPenalty) else None


def _trained(model: nn.Module | None) -> list[Tensor]:
    return [] if model is None else [p for p in model.parameters() if p.requires_grad]


def _reduction(loss: nn.Module) -> str:
    return str(getattr(loss, "reduction", "mean"))


def _is_counted(loss: nn.Module) -> bool:
    """Return whether torch divides this loss by something other than the number of samples."""
    return isinstance(loss, _CROSS_ENTROPIES) and loss.reduction == "mean"


def _count(loss: nn.Module, target: Tensor) -> Tensor | int:
    """Return the total weight of the labels that are not ignored; an int if known on the host."""
    assert isinstance(loss, _CROSS_ENTROPIES)
    if target.is_floating_point():  # class probabilities: torch divides by the number of samples
        return target.numel() // (target.shape[1] if target.ndim > 1 else 1)
    if loss.weight is None:
        if _all_count(target, loss.ignore_index):
            return target.numel()
        return (target != loss.ignore_index).count_nonzero()
    valid = target != loss.ignore_index
    weights: Tensor = loss.weight.to(target.device)[target.clamp(min=0, max=len(loss.weight) - 1)]
    return (weights * valid).sum()


def _all_count(target: Tensor, ignored: int) -> bool:
    if target.device.type != "cpu":
        least = least_of(target)
        return least is not None and ignored < 0 <= least
    # One reduction suffices for the usual negative index, which is below all labels.
    if ignored < 0 and target.numel() and target.min().item() >= 0:
        return True
    return not (target == ignored).any().item()
