"""Trained weights: read without executing code, and loaded into a network for other data."""

import fnmatch
import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any, Literal

import torch
import torchvision
from torch import Tensor, nn

from regimen.conf.errors import truncated_list
from regimen.models.layers import NetworkError
from regimen.trainer.checkpoints.borrowed import mark_as_read
from regimen.trainer.checkpoints.reader import model_only
from regimen.trainer.errors import CheckpointError
from regimen.trainer.files.names import ForeignNameError, path_below

log = logging.getLogger(__name__)
Head = nn.Linear | nn.Conv2d
_TORCHVISION = "torchvision:"  # before the name of weights of torchvision's
_weights_wanted: ContextVar[bool] = ContextVar("initial_weights_wanted", default=True)


class WeightsError(CheckpointError):
    """Trained weights that the configuration names and that cannot be had."""

    exit_code = 2


@contextmanager
def no_initial_weights() -> Iterator[None]:
    """Build models without reading their initial weights.

    Used before a checkpoint is loaded: a resumed or evaluated run must not need the files, or the
    network connection, of its initial weights.
    """
    token = _weights_wanted.set(False)
    try:
        yield
    finally:
        _weights_wanted.reset(token)


def weights_wanted() -> bool:
    """Return whether a model should load its initial weights; False on the meta device."""
    return _weights_wanted.get() and torch.get_default_device().type != "meta"


def fine_tune(
    model: nn.Module,
    weights: str,
    checkpoint: Literal["best", "last"] = "best",
    prefix: str = "",
    drop: Sequence[str] = (),
    head: str | None = None,
    strict: bool = True,
    average: bool = True,
    freeze_batch_norm: bool = False,
) -> nn.Module:
    """Load the weights of a file, a run directory or torchvision into `model`, and return it.

    Args:
        model: the network, built for the new classes.
        weights: a file, a run directory, or `torchvision:ResNet18_Weights.DEFAULT`.
        checkpoint: the checkpoint of a run directory.
        prefix: load only names with this prefix, and remove it from them.
        drop: globs over names that are not loaded.
        head: the module that may have another number of outputs (default: the last linear or
            convolution layer).
        strict: raise CheckpointError for names that only the weights or only the network have.
        average: load the average of the weights (EMA, SWA) if the checkpoint has one.
        freeze_batch_norm: keep the statistics, scales and shifts of BatchNorm, also in training.
    """
    if weights_wanted():
        state = {}
        for name, value in read_weights(weights, checkpoint, average).items():
            if name.startswith(prefix):
                state[name.removeprefix(prefix)] = value
        if not state:
            raise CheckpointError(f"{weights} has no name with the prefix {prefix!r}")
        outcome = load_weights(model, state, drop, head)
        file = file_of(weights, checkpoint)
        mark_as_read(model, set(outcome["loaded"]), [file], "model.weights", weights)
        _report(weights, outcome, strict)
    if freeze_batch_norm:
        _freeze_norms(model)
    return model


def _report(weights: str, outcome: dict[str, list[str]], strict: bool) -> None:
    """Log what `load_weights` returned. Raises CheckpointError for names of one side if strict."""
    report = f"{len(outcome['loaded'])} tensors loaded"
    for kind, names in outcome.items():
        if names and kind != "loaded":
            report += f"; {kind}: {truncated_list(names, 4)}"
    differs = bool(outcome["missing"] or outcome["unexpected"])
    if strict and differs:
        raise CheckpointError(
            f"{weights} does not fit the network: {report}; "
            "exclude names with model.drop, or allow it with model.strict=false"
        )
    level = logging.WARNING if differs else logging.INFO
    log.log(level, "initial weights %s: %s", weights, report)


class FrozenBatchNorm(nn.Module):
    """A BatchNorm that computes in training what it does in evaluation, and never changes.

    Its state has the names of the BatchNorm's, so that either can be loaded into the other.
    """

    running_mean: Tensor
    running_var: Tensor
    weight: Tensor
    bias: Tensor

    def __init__(self, norm: nn.BatchNorm1d | nn.BatchNorm2d | nn.BatchNorm3d) -> None:
        super().__init__()
        self.eps = norm.eps
        for name, value in norm.state_dict().items():
            self.register_buffer(name, value)

    def forward(self, x: Tensor) -> Tensor:
        """Normalise by the trained statistics."""
        return nn.functional.batch_norm(
            x, self.running_mean, self.running_var, self.weight, self.bias, eps=self.eps
        )


def _freeze_norms(model: nn.Module) -> None:
    kinds = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
    for module in list(model.modules()):
        for name, norm in list(module.named_children()):
            if isinstance(norm, kinds) and norm.affine and norm.track_running_stats:
                setattr(module, name, FrozenBatchNorm(norm))


def load_weights(
    model: nn.Module, state: Mapping[str, Tensor], drop: Sequence[str] = (), head: str | None = None
) -> dict[str, list[str]]:
    """Load `state` into `model`; return lists of names by their outcome.

    loaded: into the network. adapted: also loaded, the first convolution, to another number of
    input channels. resized: not loaded, the head, which has another number of outputs. dropped: not
    loaded, by `drop`. missing: only in the network. unexpected: only in the weights. Raises
    CheckpointError if any other shape differs.
    """
    network = model.state_dict()
    dropped = _dropped_names([*state, *network], drop)
    if head is None:
        head = _last_layer(model)
    first_conv = None
    for name, parameter in model.named_parameters():
        if parameter.ndim == 4:
            first_conv = name
            break

    selected = {}
    adapted = []
    resized = []
    for name, value in state.items():
        if name in dropped:
            continue
        shape = value.shape
        wanted = network.get(name, value).shape
        if name.startswith(f"{head}.") and shape != wanted and shape[1:] == wanted[1:]:
            resized.append(name)
        elif name == first_conv and shape[1] != wanted[1]:
            adapted.append(name)
            selected[name] = _adapted(value, wanted[1])
        else:
            selected[name] = value

    try:
        result = model.load_state_dict(selected, strict=False)
    except RuntimeError as error:
        raise CheckpointError(f"{first_mismatch(error)} exclude names with model.drop") from error
    if len(result.unexpected_keys) == len(selected):
        raise CheckpointError(
            f"no name of the weights is in the network: {truncated_list(list(state), 4)} "
            f"against {truncated_list(list(network), 4)}; see model.prefix"
        )
    expected = {*dropped, *resized}  # to be missing
    return {
        "loaded": [name for name in selected if name not in result.unexpected_keys],
        "adapted": adapted,
        "resized": resized,
        "dropped": [name for name in state if name in dropped],
        "missing": [name for name in result.missing_keys if name not in expected],
        "unexpected": result.unexpected_keys,
    }


def first_mismatch(error: RuntimeError) -> str:
    """Return the first reason of a `load_state_dict` that failed: torch lists one a line."""
    return str(error).splitlines()[1].strip()  # behind a title


def _dropped_names(names: list[str], patterns: Sequence[str]) -> set[str]:
    dropped = set[str]()
    for pattern in patterns:
        matches = fnmatch.filter(names, pattern)
        if not matches:
            raise NetworkError(
                f"model.drop: {pattern!r} matches no name among {truncated_list(names, 4)}"
            )
        dropped.update(matches)
    return dropped


def _last_layer(model: nn.Module) -> str | None:
    last = None
    for name, module in model.named_modules():
        if isinstance(module, Head):
            last = name
    return last


def read_weights(
    source: str, checkpoint: str = "best", average: bool = True, key: str = "model.weights"
) -> Mapping[str, Any]:
    """Return a state dict from `source`.

    `source` is a file (`.pt`, `.pth`, `.safetensors`), a run directory (its `checkpoint`) or
    `torchvision:ResNet18_Weights.DEFAULT`. `average`: return the average of the weights (EMA, SWA)
    if a checkpoint has one. `key` of the configuration: what errors name.
    """
    if source.startswith(_TORCHVISION):
        return fetch(_torchvision_entry(source, key), key)
    return model_only(file_of(source, checkpoint, key), average)


def file_of(source: str, checkpoint: str = "best", key: str = "model.weights") -> Path:
    """Return the file that `read_weights` reads. Raises NetworkError where there is none."""
    if source.startswith(_TORCHVISION):
        return cached_file(_torchvision_entry(source, key))
    path = Path(source).expanduser()
    if path.is_dir():
        try:
            path = path_below(path, f"checkpoints/{checkpoint}.pt")
        except ForeignNameError as error:
            raise NetworkError(f"{key}: {error}") from error
    if not path.is_file():
        raise NetworkError(
            f"{key}: no file {path}; it takes a .pt or .safetensors file, a run directory, "
            "or weights to download, such as torchvision:ResNet50_Weights.DEFAULT"
        )
    return path


def _torchvision_entry(source: str, key: str) -> Any:
    name = source.removeprefix(_TORCHVISION)
    try:
        return torchvision.models.get_weight(name)
    except (KeyError, ValueError) as error:
        raise NetworkError(
            f"{key}: torchvision has no weights named {name!r}; "
            "the form is torchvision:ResNet18_Weights.DEFAULT"
        ) from error


def cached_file(entry: Any) -> Path:
    """Return where torch keeps the file of a torchvision weights entry, once it is fetched."""
    name: str = entry.url.rpartition("/")[2]
    return Path(torch.hub.get_dir()) / "checkpoints" / name


def fetch(entry: Any, key: str = "model.weights") -> dict[str, Tensor]:
    """Return the state dict of a torchvision weights entry, from its cache or the network."""
    try:
        return dict(entry.get_state_dict(progress=False, check_hash=True))
    except (OSError, RuntimeError) as error:
        raise WeightsError(
            f"{key}: cannot get {entry} from {entry.url}: {error}; where there is no "
            f"network, put the file in {cached_file(entry).parent}, or "
            "set model.weights of model=finetune to a file of yours"
        ) from error


def parameters_as_in(model: nn.Module, state: Mapping[str, Tensor]) -> set[str]:
    """Return the names of the parameters that have the values of a state dict."""
    names = set()
    for name, parameter in model.named_parameters():
        if name in state and torch.equal(state[name].to(parameter), parameter):
            names.add(name)
    return names


def resize_head(model: nn.Module, num_classes: int, outputs: int) -> None:
    """Give each linear or convolution layer with `outputs` outputs `num_classes` new ones."""
    if num_classes == outputs:
        return
    for layer in model.modules():
        if not isinstance(layer, Head) or len(layer.weight) != outputs:
            continue
        for parameter in layer.parameters():
            parameter.data = parameter.new_empty(num_classes, *parameter.shape[1:])
        if isinstance(layer, nn.Linear):
            layer.out_features = num_classes
        else:
            layer.out_channels = num_classes
        layer.reset_parameters()


@torch.no_grad()
def resize_input(model: nn.Module, in_channels: int, trained: bool) -> None:
    """Give the first convolution `in_channels` input channels.

    `trained` weights compute the same result for grey images as before. Untrained ones are repeated
    or left out, which keeps the distribution of the network's own initialization.
    """
    conv = next((module for module in model.modules() if isinstance(module, nn.Conv2d)), None)
    if conv is None:
        raise NetworkError(f"{type(model).__name__} has no convolution for model.in_channels")
    if trained:
        conv.weight.data = _adapted(conv.weight, in_channels)
    else:
        conv.weight.data = conv.weight[:, torch.arange(in_channels) % conv.in_channels]
    conv.in_channels = in_channels


def _adapted(weight: Tensor, in_channels: int) -> Tensor:
    """Adapt a convolution's weight (out, in, h, w) to `in_channels` channels.

    Each new channel is the sum of the old ones divided by the new number of channels, so that the
    result is the same for images whose channels are equal.
    """
    total = weight.sum(dim=1, keepdim=True)
    return (total / in_channels).expand(-1, in_channels, -1, -1).contiguous()
