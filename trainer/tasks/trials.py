"""Models tried with a few tokens before a run: what would be wrong in silence is refused."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from regimen.trainer.errors import SHAPE_ERRORS, ModelError, qualified_name

Call = Callable[[Mapping[str, Tensor]], Tensor]  # of a model: its logits [n, ...] for inputs

_LENGTH = 12  # tokens of the two documents that a model is tried with
# Of logits, relative to the largest one. What documents see of each other is more, and the rounding
# of single precision is less: of one shape, and of two.
_LEAST = 1e-3
_LEAST_OF_TWO_SHAPES = 1e-2


def parts_of(dataset: Any) -> list[Any]:
    """Return the data sets that a mixture consists of, or the data set itself."""
    mixed: Mapping[str, Any] = getattr(dataset, "sets", {"": dataset})
    return [*mixed.values()]


def check_padding(
    model: nn.Module, call: Call, alone: Mapping[str, Tensor], padded: Mapping[str, Tensor]
) -> None:
    """Raise ModelError for a model whose answer to a text depends on empty places behind it.

    So do decoders of transformers that classify by the last token, if their padding token is not
    that of the tokenizer.

    alone, padded: inputs [1, length] of the same text, the latter with empty places. A collective
    where the model is sharded. A model that fails is not judged: its first update says why.
    """
    expected = _logits_in_evaluation(model, call, alone)
    found = _logits_in_evaluation(model, call, padded)
    if expected is None or found is None:
        return
    if found.ndim == expected.ndim == 3:
        found = found[:, : expected.shape[1]]
    if found.shape != expected.shape:
        return
    # The host waits for the comparison, once before a run.
    if _differs(found, expected, _LEAST_OF_TWO_SHAPES):
        raise ModelError(
            "model",
            f"{_name(model)} gives another answer to a text with empty places behind it: the "
            "result would depend on data.padding and on the other texts of a micro-batch",
            "of a decoder pad_token_id in its config.json has to be that of the tokenizer",
        )


def check_rows(
    model: nn.Module,
    call: Call,
    row: Tensor,
    is_packed: bool,
) -> None:
    """Raise ModelError for a model that lets the documents of a row see each other.

    Transformers keeps them apart for those of its models that make their masks from
    `position_ids`; the others read on over the end of a document without a word. Refused as well is
    a model that reads from both sides, which sees the token that it is to predict.

    row: tokens [context], of which the first ones are tried.
    is_packed: whether several documents share a row.
    A collective where the model is sharded. A model that fails is not judged: its first update says
    why.
    """
    first = row[: min(_LENGTH, len(row) // 2)]
    second = first.flip(0)
    places = torch.arange(len(first))
    nothing = torch.zeros_like(first)
    # In one batch, so that all are rounded alike: both documents in a row, and each of them alone.
    rows = [(first, second), (first, nothing), (second, nothing)]
    positions = [(places, places), (places, nothing), (places, nothing)]
    inputs = {
        "input_ids": torch.stack([torch.cat(halves) for halves in rows]),
        "position_ids": torch.stack([torch.cat(halves) for halves in positions]),
    }
    logits = _logits_in_evaluation(model, call, inputs)
    if logits is None:
        return
    both, first_alone, second_alone = logits
    # The host waits for these comparisons, once before a run.
    length = len(first)
    if _differs(both[:length], first_alone[:length]):
        raise ModelError(
            "model",
            f"{_name(model)} computes other logits of a token once others follow it: it sees the "
            "token that it is to predict",
            "take one that reads from left to right, as BERT does with is_decoder in config.json",
        )
    if is_packed and _differs(both[length:], second_alone[:length]):
        raise ModelError(
            "data.pack",
            f"is true, and {_name(model)} lets the conversations of a row see each other: it makes "
            "no mask from position_ids",
            "set data.pack=false",
        )


def _logits_in_evaluation(
    model: nn.Module, call: Call, inputs: Mapping[str, Tensor]
) -> Tensor | None:
    """Return the logits of a model in evaluation mode; None if it fails."""
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        with torch.no_grad():
            return call({name: tensor.to(device) for name, tensor in inputs.items()})
    except SHAPE_ERRORS:
        return None
    finally:
        for module, mode in modes:
            module.training = mode


def _differs(some: Tensor, others: Tensor, least: float = _LEAST) -> bool:
    """Return whether logits differ by more than rounding."""
    limit = max(least, 8 * torch.finfo(some.dtype).eps)
    difference = (some - others).abs().max()
    return bool(difference > limit * some.abs().max())


def _name(model: nn.Module) -> str:
    """Return the class of a model, or of the one of transformers that it holds."""
    return qualified_name(getattr(model, "model", model))
