"""Losses: one torch loss module, or a weighted sum of several by name."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from regimen.data.batch import cached_min
from regimen.trainer.device import count_true
from regimen.trainer.errors import ModelError
from regimen.trainer.task import SUM

_CROSS_ENTROPIES = (nn.CrossEntropyLoss, nn.NLLLoss)
_MODULES = [name for name in dir(nn) if name.endswith("Loss")]
# Losses that compare an output with values of its shape: class labels become one-hot vectors.
_BY_VALUE = (
    nn.BCEWithLogitsLoss,
    nn.BCELoss,
    nn.MultiLabelSoftMarginLoss,
    nn.MSELoss,
    nn.L1Loss,
    nn.SmoothL1Loss,
    nn.HuberLoss,
)


def vector(values: Sequence[float]) -> Tensor:
    """Return a list of numbers as a tensor, for arguments such as `weight` and `pos_weight`."""
    return torch.tensor(list(values), dtype=torch.float32)


class FunctionLoss(nn.Module):
    """A function as a loss: `function(output, target)`, a mean over the samples or one for each."""

    def __init__(self, function: Callable[..., Tensor]) -> None:
        super().__init__()
        self.function = function
        # A functools.partial (`_partial_` in a config) may fix the reduction.
        self.reduction = getattr(function, "keywords", {}).get("reduction", "mean")

    def forward(self, output: Any, target: Any) -> Tensor:
        """Return what the function does."""
        return self.function(output, target)


def _as_module(loss: Any) -> nn.Module:
    """Return a loss as a module; a function of torch's as the class that counts as it does.

    So `functional.cross_entropy` becomes a CrossEntropyLoss, whose mean is over labels.
    """
    if isinstance(loss, nn.Module):
        return loss
    if not callable(loss):
        raise ModelError("task.loss", f"is {loss!r}, which is no loss", _spelling_hint(loss))
    function = getattr(loss, "func", loss)  # of a functools.partial
    name = getattr(function, "__name__", "")
    if getattr(nn.functional, name, None) is not function:
        return FunctionLoss(loss)
    class_name = _loss_class(name.removesuffix("_loss").replace("_", ""))
    if class_name is None:
        return FunctionLoss(loss)
    module: nn.Module = getattr(nn, class_name)(**getattr(loss, "keywords", {}))
    return module


def _loss_class(word: str) -> str | None:
    """Return the torch loss class of a name in lower case without `loss`: `crossentropy`."""
    return next((name for name in _MODULES if name.lower() == f"{word}loss"), None)


def _spelling_hint(text: Any) -> str:
    """Return how to write a loss that was given as a word."""
    word = str(text).rpartition(".")[2].lower().replace("_", "").removesuffix("loss")
    name = _loss_class(word) or "CrossEntropyLoss"
    return (
        f"a loss is a node, such as task.loss={{_target_: torch.nn.{name}}}, or task/loss=CHOICE; "
        f"from Python an object, loss=torch.nn.{name}()"
    )


class BinaryCrossEntropy(nn.BCEWithLogitsLoss):
    """Binary cross-entropy of each class on its own, for class labels and for mixed ones.

    A mean over samples and classes. `target_threshold`: of labels mixed by MixUp or CutMix, classes
    with a larger share count as 1, all others as 0 (Wightman et al. 2021); null: their shares.
    """

    def __init__(self, target_threshold: float | None = None) -> None:
        super().__init__()
        if target_threshold is not None and not 0 <= target_threshold < 1:
            raise ModelError(
                "task.loss.target_threshold", f"expected a share >= 0, < 1, got {target_threshold}"
            )
        self.target_threshold = target_threshold

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        """Return the loss of logits (n, classes, ...) and the shares of classes, of that shape."""
        if self.target_threshold is not None:
            target = (target > self.target_threshold).to(output.dtype)
        return super().forward(output, target)


@dataclass
class Term:
    """A weighted term of a sum of losses: `weight * loss(output, target)`."""

    loss: Any  # a module; or a function, which becomes one
    weight: float = 1.0

    def __post_init__(self) -> None:
        self.loss = _as_module(self.loss)
        # Of a gradient penalty: with respect to what ("inputs", "parameters"); else None.
        self.wrt = getattr(self.loss, "wrt", None)


Loss = nn.Module | Term | Mapping[str, nn.Module | Term | None]


class Losses:
    """Compute a loss, or several by name, and the denominators of their means.

    The `reduction` of a term is a mean over the samples, a sum over them, or one value for each.
    torch's cross entropy takes its mean over the labels other than `ignore_index`, weighted by
    their class weights. A loss that is None is dropped.
    """

    def __init__(self, loss: Loss, ignore_index: int | None = None) -> None:
        """`ignore_index`: a label of the task that no loss, score or metric counts."""
        given = loss if isinstance(loss, Mapping) else {"": loss}
        self.terms = {}
        for name, term in given.items():
            if term is not None:
                self.terms[name] = term if isinstance(term, Term) else Term(term)
        self.wrt = {term.wrt for term in self.terms.values()}
        if None not in self.wrt:
            raise ModelError("task.loss has only gradient penalties: add a loss on the output")

        # Terms that torch divides by something other than the number of samples.
        self.counted: list[str] = []
        self.summed: list[str] = []
        ignored = []
        for name, term in self.terms.items():
            module = term.loss
            _check_label_smoothing(name, module)
            reduction = getattr(module, "reduction", "mean")
            if reduction == "sum":
                self.summed.append(name)
            if isinstance(module, _CROSS_ENTROPIES):
                ignored.append(module.ignore_index)
                if reduction == "mean":
                    self.counted.append(name)
        # The labels that no score and no metric counts: of the first cross entropy, and the task's.
        labels = [*ignored[:1], ignore_index]
        self.ignored = [label for label in dict.fromkeys(labels) if label is not None]

    @property
    def names(self) -> list[str]:
        """The losses that an evaluation reports; gradient penalties exist in training only."""
        named = [f"loss_{name}" for name, term in self.terms.items() if name and not term.wrt]
        return ["loss", *named]

    def valid_labels(self, target: Tensor) -> tuple[Tensor, Tensor | int]:
        """Return class labels, below 0 where one is ignored, and how many count.

        The count is an int where the host knows it, else a tensor on the device. Class
        probabilities become the most probable class.
        """
        if target.is_floating_point():
            target = target.argmax(1)
            return target, target.numel()
        if not self.ignored:
            return target, target.numel()
        if len(self.ignored) == 1:
            (ignored,) = self.ignored
            count = _count_valid(target, ignored)
            if isinstance(count, int) or ignored < 0:  # nothing to ignore, or already below 0
                return target, count
            return target.where(target != ignored, -1), count
        for ignored in self.ignored:
            target = target.where(target != ignored, -1)
        return target, count_true(target >= 0)

    @property
    def modules(self) -> dict[str, nn.Module]:
        """The losses by name: `loss`, or `loss.<term>`."""
        return {f"loss.{name}" if name else "loss": t.loss for name, t in self.terms.items()}

    def counts(self, target: Tensor) -> Mapping[str, Tensor | int]:
        """Return the denominators for a batch of labels; an int where the host knows it."""
        counts: dict[str, Tensor | int] = {}
        for name in self.counted:
            loss: Any = self.terms[name].loss
            if target.is_floating_point():  # torch's mean over probabilities is over the samples
                num_classes = target.shape[1] if target.ndim > 1 else 1
                counts[name] = target.numel() // num_classes
            elif loss.weight is None:
                counts[name] = _count_valid(target, loss.ignore_index)
            else:
                # Ignored labels may be no index of the weights: any weight will do, it is left out.
                indices = target.clamp(min=0, max=len(loss.weight) - 1)
                weights = loss.weight.to(target.device)[indices]
                is_valid = target != loss.ignore_index
                counts[name] = (weights * is_valid).sum()
        return counts

    def prepare_inputs(self, inputs: Any) -> Any:
        """Return inputs that require a gradient, if a gradient penalty on inputs needs it."""
        if "inputs" not in self.wrt or not torch.is_grad_enabled():
            return inputs
        if not isinstance(inputs, Tensor) or not inputs.is_floating_point():
            raise ModelError(
                "a gradient penalty on inputs needs inputs that are one floating-point tensor"
            )
        return inputs.detach().requires_grad_()

    def __call__(
        self, output: Any, target: Any, inputs: Any = None, model: nn.Module | None = None
    ) -> tuple[dict[str, Tensor], Mapping[str, Any]]:
        """Return the weighted terms of the loss by name, and the denominators.

        Gradient penalties need `inputs` (from `prepare_inputs`) and `model`.
        """
        values = {}
        for name, term in self.terms.items():
            if term.wrt is None:
                value = _evaluate(term.loss, output, target)
                values[name] = value if term.weight == 1 else value * term.weight
            elif torch.is_grad_enabled():
                sources = [inputs]
                if term.wrt == "parameters":
                    parameters = [] if model is None else model.parameters()
                    sources = [p for p in parameters if p.requires_grad]
                values[name] = term.loss(output, target, sources) * term.weight
        sums = {name: SUM for name in self.summed if name in values}
        return values, {**self.counts(target), **sums}


def _check_label_smoothing(name: str, module: nn.Module) -> None:
    smoothing = getattr(module, "label_smoothing", 0)
    if not 0 <= smoothing <= 1:  # torch ignores values below 0
        raise ModelError(
            f"task.loss.{name}".rstrip("."),
            f"label_smoothing must be between 0.0 and 1.0, got {smoothing}",
        )


def flatten_positions(output: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Flatten logits (n, classes, d...) and labels (n, d...) to (positions, classes), (positions).

    For labels of more than one dimension torch's losses have no deterministic kernel, and the one
    that they have is slower.
    """
    if output.ndim < 3 or target.is_floating_point():
        return output, target
    return output.movedim(1, -1).flatten(0, -2), target.flatten()


def _evaluate(loss: nn.Module, output: Any, target: Any) -> Tensor:
    if isinstance(loss, _CROSS_ENTROPIES):
        value: Tensor = loss(*flatten_positions(output, target))
        by_label = value.ndim and not target.is_floating_point()  # reduction="none"
        return value.view(target.shape) if by_label else value
    if isinstance(loss, _BY_VALUE):
        target = _as_values(output, target)
    result: Tensor = loss(output, target)
    return result


def _as_values(output: Any, target: Any) -> Any:
    """Return class labels (n, d...) as values (n, classes, d...) for an output of that shape.

    MixUp makes such values in training, and an evaluation has labels. Raises IndexError for a label
    that is no class, as torch's cross entropy does.
    """
    if not (isinstance(output, Tensor) and isinstance(target, Tensor)):
        return target
    if target.is_floating_point() or output.ndim != target.ndim + 1:
        return target
    try:
        values = nn.functional.one_hot(target.long(), output.shape[1])
    except RuntimeError as error:
        raise IndexError(str(error)) from error
    return values.movedim(-1, 1).to(output.dtype)


def _count_valid(target: Tensor, ignored: int) -> Tensor | int:
    """Return the number of labels that are not ignored; an int if the host knows that all count.

    It is remembered until the labels are changed in place: the loss and the scores both need it.
    """
    version = 0 if target.is_inference() else target._version
    key = version, ignored
    cached_key, count = getattr(target, "_valid", (None, 0))
    if cached_key != key:
        least = cached_min(target)
        all_count = least is not None and ignored < 0 <= least
        count = target.numel() if all_count else count_true(target != ignored)
        target._valid = key, count  # type: ignore[attr-defined]
    return count
