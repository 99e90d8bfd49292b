"""Models of transformers by name; transformers is optional and imported when a model is built."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from regimen.conf.errors import truncated_list
from regimen.conf.json_text import plain_json
from regimen.data.errors import import_package, short_line
from regimen.data.tokenizers import refuse_remote_code, remote_code_allowed, require_available
from regimen.models.layers import NetworkError
from regimen.models.pretrained import weights_wanted
from regimen.trainer.checkpoints.borrowed import mark_as_read
from regimen.trainer.errors import CheckpointError

# What transformers raises for a folder whose files, or the values in them, are none that it takes.
_UNFIT = (OSError, ValueError, LookupError, ImportError, AttributeError, ArithmeticError, TypeError)


class Logits(nn.Module):
    """A model of transformers that takes a batch's inputs and returns its logits.

    Inputs are a dict of named tensors (as a tokenizer makes them), token ids (n, length), or images
    (n, C, H, W). The logits are (n, classes), or (n, length, classes) of models for tokens.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.main_input: str = model.main_input_name  # type: ignore[assignment]
        self._is_causal = type(model).__name__.endswith(("ForCausalLM", "LMHeadModel"))

    def forward(
        self,
        inputs: Tensor | Mapping[str, Tensor] | None = None,
        labels: Tensor | None = None,
        **named: Tensor,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Return the logits; with labels the loss that the model computes itself, and the logits.

        Labels of a causal language model (n, length) are the next token at each position. Inputs
        may also be given by name.
        """
        if isinstance(inputs, Tensor):
            inputs = {self.main_input: inputs}
        arguments: dict[str, Any] = {**(inputs or {}), **named}
        if self._is_causal:
            # A cache is of no use here, and transformers would let the documents of a row see each
            # other if there was one.
            arguments["use_cache"] = False
        if labels is None:
            return self.model(**arguments).logits  # type: ignore[no-any-return]
        arguments["labels"] = labels
        if self._is_causal:
            # Our data sets have shifted the labels already: without this transformers would shift
            # them once more.
            arguments["shift_labels"] = labels
        output = self.model(**arguments)
        return output.loss, output.logits


def build(
    name: str,
    num_classes: int | None,
    auto: str = "AutoModelForSequenceClassification",
    pretrained: bool = True,
    config: Mapping[str, Any] | None = None,
    context: int | None = None,
) -> nn.Module:
    """Build a model by the class `auto`: `name` is a folder, a name on the hub, or a model type.

    With `config` it is a model type, such as `bert`, built without weights from these values; no
    network is needed. Weights are read from .safetensors files only, and code that comes with them
    runs only where `regimen.data.tokenizers.allow_remote_code` allows it.

    num_classes: classes, or tokens of the vocabulary; None, where nothing counts those of the data:
    as many as the model has.
    context: tokens of a sample; more than a model has learnt positions for are refused.
    """
    transformers = import_package("transformers", "transformers")
    transformers.utils.logging.disable_progress_bar()  # a line for each model that is built
    if not auto.startswith("AutoModelFor") or not hasattr(transformers, auto):
        raise NetworkError(f"model.auto: transformers has no {auto!r}; try AutoModelForCausalLM")
    auto_model = getattr(transformers, auto)
    runs_code = remote_code_allowed()
    is_causal = auto == "AutoModelForCausalLM"
    size = {}
    if num_classes is not None:
        size["vocab_size" if is_causal else "num_labels"] = num_classes
    if config is None:
        require_available("model.name", name)
    with _named(name, NetworkError):
        if config is not None:
            model_config = transformers.AutoConfig.for_model(name, **{**config, **size})
        else:
            # The vocabulary size of a stored language model is not changed.
            options = {} if is_causal else size
            model_config = transformers.AutoConfig.from_pretrained(
                name, trust_remote_code=runs_code, **options
            )
    text_config = model_config.get_text_config()
    vocabulary = getattr(text_config, "vocab_size", None)
    needed = num_classes or 0  # not known where nothing counts the tokens of the data
    if is_causal and vocabulary is not None and needed > vocabulary:
        raise NetworkError(
            "model.name",
            f"{name} has a vocabulary of {vocabulary:,} tokens, and the data have {needed:,}",
            "take the tokenizer of the model (data.tokenizer)",
        )
    _check_positions(name, text_config, context)
    if config is not None or not pretrained or not weights_wanted():
        with _named(name, NetworkError):
            return Logits(auto_model.from_config(model_config, trust_remote_code=runs_code))

    _refuse_pickled(name)
    with _named(name, CheckpointError):
        model, outcome = auto_model.from_pretrained(
            name,
            config=model_config,
            dtype=torch.float32,
            use_safetensors=True,
            ignore_mismatched_sizes=True,  # a head for other classes is initialized anew
            output_loading_info=True,
            trust_remote_code=runs_code,
        )
        files = _weight_files(name, model_config)
    mismatched = {key for key, *_ in outcome["mismatched_keys"]}  # with shapes: here, in the files
    initialized = mismatched.union(outcome["missing_keys"])
    # A head for other classes is drawn anew, and nothing else; of a language model not even that.
    body = f"{model.base_model_prefix}."
    drawn = {key for key in mismatched if key.startswith(body)}
    if is_causal:
        drawn = initialized.intersection(dict(model.named_parameters()))
    if drawn:
        raise CheckpointError(
            f"model.name={name}: its files lack {len(drawn)} weights of the model, or have them in "
            f"another shape: {truncated_list(sorted(drawn), 4)}: its config.json is that of "
            "another model, or it was saved without its output layer"
        )
    loaded = set[str]()
    for parameter, _ in model.named_parameters(remove_duplicate=False):
        if parameter not in initialized:
            loaded.add(f"model.{parameter}")  # its name in `Logits`
    network = Logits(model)
    mark_as_read(network, loaded, files, "model.name", name)
    return network


@contextmanager
def _named(name: str, kind: type[Exception]) -> Iterator[None]:
    """Say in an error of transformers which model it is about, in one of `kind`."""
    try:
        with refuse_remote_code("model.name", name):
            yield
    except _UNFIT as error:
        raise kind(f"model.name={name}: {short_line(error)}") from error
    except Exception as error:
        # That of safetensors is of a package which is not imported before a model is read.
        if type(error).__name__ != "SafetensorError":
            raise
        raise kind(f"model.name={name}: its weights are not whole: {error}") from error


def _refuse_pickled(name: str) -> None:
    """Raise CheckpointError for a folder whose weights are pickled files alone."""
    folder = Path(name)
    pickled = sorted(path.name for path in folder.glob("pytorch_model*.bin"))
    if pickled and not any(folder.glob("*.safetensors")):
        raise CheckpointError(
            f"model.name={name}: its weights are in {pickled[0]}, a pickle, which could run code "
            "and is not read: load it by transformers, and save_pretrained writes .safetensors"
        )


def _weight_files(name: str, config: Any) -> list[Path]:
    """Return the files that `from_pretrained` reads; none where it is told to read others."""
    hub = import_package("huggingface_hub", "transformers")

    def find(file: str) -> Path | None:
        path = Path(name, file)
        if Path(name).is_dir():
            return path if path.is_file() else None
        cached = hub.try_to_load_from_cache(name, file)
        return Path(cached) if isinstance(cached, str) else None

    if getattr(config, "transformers_weights", None) or find("adapter_config.json"):
        return []
    weights = find("model.safetensors")
    if weights is not None:
        return [weights]
    index = find("model.safetensors.index.json")
    if index is None:
        return []
    shards = set(plain_json(index.read_bytes())["weight_map"].values())
    return [index.parent / shard for shard in sorted(shards)]


def _check_positions(name: str, config: Any, context: int | None) -> None:
    """Raise NetworkError if positions are a table that is too short; rotary ones have no end."""
    positions = getattr(config, "max_position_embeddings", None)
    # A few models have no `rope_parameters`.
    is_rotary = hasattr(config, "rope_parameters") or hasattr(config, "rope_theta")
    if context is None or positions is None or is_rotary or context <= positions:
        return
    raise NetworkError(
        "data.context",
        f"{context:,} tokens are more than the {positions:,} positions of {name}",
        f"set data.context={positions}, or less",
    )
