"""Losses: one torch loss module, or a weighted sum of several by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
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

Loss = nn.Module | Mapping[str, nn.Module | None]


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


class Losses:
    """Compute a loss, or several by name, and the denominators of their means.

    The `reduction` of a term is a mean over the samples, a sum over them, or one value for each.
    torch's cross entropy takes its mean over the labels other than `ignore_index`, weighted by
    their class weights. A loss that is None is dropped.
    """

    def __init__(self, loss: Loss) -> None:
        given = loss if isinstance(loss, Mapping) else {"": loss}
        named = {name: module for name, module in given.items() if module is not None}
        self.terms = {n: m if isinstance(m, Term) else Term(m) for n, m in named.items()}
        parts = {name: term.loss for name, term in self.terms.items()}
        # What a penalty is taken with respect to; None for a loss on the output.
        self.wrt = {n: m.wrt if isinstance(m, GradientPenalty) else None for n, m in parts.items()}
        if all(self.wrt.values()):
            raise ModelError("task.loss has only gradient penalties: add a loss on the output")
        for name, module in parts.items():
            smoothing = getattr(module, "label_smoothing", 0.0)
            if smoothing < 0:  # which torch takes as none
                message = f"label_smoothing must be between 0.0 and 1.0, got {smoothing}"
                raise ModelError(Problem(f"task.loss.{name}".rstrip("."), message))
        entropies = {n: m for n, m in parts.items() if isinstance(m, _CROSS_ENTROPIES)}
        # Terms that torch divides by something other than the number of samples.
        self.counted = [name for name, module in entropies.items() if module.reduction == "mean"]
        self.summed = [n for n, m in parts.items() if getattr(m, "reduction", "mean") == "sum"]
        # `ignore_index` of the first cross entropy.
        self.ignored = next((module.ignore_index for module in entropies.values()), None)
        # A loss that needs neither terms nor denominators.
        plain = isinstance(loss, nn.Module) and not isinstance(loss, Term)
        self.single = parts[""] if plain and not self.counted and not self.summed else None
        self._known: dict[int, _Known] = {}  # by the `id` of labels

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
            loss = self.terms[name].loss
            if loss.weight is None and loss.ignore_index == self.ignored:
                count = known  # of the same labels
        if count is None:
            count = (target != self.ignored).count_nonzero()
        labels = target if self.ignored < 0 else target.where(target != self.ignored, -1)
        return labels, count

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
                trained = [] if model is None else model.parameters()
                sources = [inputs] if wrt == "inputs" else [p for p in trained if p.requires_grad]
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
