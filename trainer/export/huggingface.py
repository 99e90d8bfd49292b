"""Models of transformers as folders that transformers and peft read: merged, or an adapter."""

from collections.abc import Mapping
from contextlib import suppress
from copy import copy, deepcopy
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from regimen.conf.errors import ConfigError
from regimen.data.errors import import_package, short_line
from regimen.data.tokenizers import load_tokenizer, read_template
from regimen.models.transformers_adapter import Logits
from regimen.trainer.checkpoints.archive import write_safetensors
from regimen.trainer.errors import ModelError
from regimen.trainer.task import in_format

ADAPTER = "peft"
MERGED = "huggingface"
# The formats that are folders of those libraries, and the file with the weights.
FOLDERS: Mapping[str, str] = {
    ADAPTER: "adapter_model.safetensors",
    MERGED: "model.safetensors",
}
_HALF = (torch.bfloat16, torch.float16)
_MODULE = "base_model.model."  # peft's name of the model in its own, before the names of weights
_LENGTH = 16  # of a random text, in tokens
_ONE_FILE = "1000TB"  # of weights, however large: one file has one digest


def write_folder(model: nn.Module, name: str, folder: Path) -> tuple[Logits, dict[str, Any]]:
    """Write a run's model into a folder, as the library that reads the format `name` does.

    Returns the model that the folder has to answer like, in single precision at least, and the
    facts that `load_folder` needs. Raises ModelError for a model that has no such form.
    """
    network = _network_of(model)
    facts = {
        "class": type(network).__name__,
        "dtype": str(network.dtype).removeprefix("torch."),
        "base": None,
    }
    if name == ADAPTER:
        facts["base"] = _write_adapter(network, folder)
    else:
        _write_merged(network, folder)
    whole = model.model if isinstance(model, Logits) else model
    return Logits(_precise(whole)), facts


def load_folder(folder: Path, facts: Mapping[str, Any]) -> Logits:
    """Return the model that the libraries read from a folder, in single precision at least."""
    transformers = import_package("transformers", "transformers")
    kind = getattr(transformers, facts["class"])
    # Only weights that run no code are read, and only classes that transformers has.
    options = {"use_safetensors": True}
    if facts["format"] == MERGED:
        return Logits(_precise(kind.from_pretrained(folder, **options)))
    peft = import_package("peft", "peft")
    dtype = getattr(torch, facts["dtype"])
    base = _precise(kind.from_pretrained(facts["base"], dtype=dtype, **options))
    return Logits(peft.PeftModel.from_pretrained(base, folder).eval())


def random_tokens(model: Logits, count: int) -> Tensor | None:
    """Return token ids [count, length] that a model can be asked about; None: it takes no text."""
    if model.main_input != "input_ids":
        return None
    config: Any = model.model.config
    vocabulary = config.get_text_config().vocab_size
    generator = torch.Generator().manual_seed(0)
    return torch.randint(vocabulary, (count, _LENGTH), generator=generator)


def write_tokenizer(data: Any, folder: Path) -> str | None:
    """Write the tokenizer of a data node, with its chat template; return why none was written."""
    node = data if isinstance(data, Mapping) else {}
    name = node.get("tokenizer")
    if not isinstance(name, str):
        return "the data of the run name no tokenizer: none is in the folder"
    try:
        tokenizer = load_tokenizer(name)
        if node.get("template"):
            tokenizer.chat_template = read_template(node["template"])
    except ConfigError as error:
        (problem,) = error.problems
        return f"no tokenizer is in the folder: {problem.key}: {problem.message}"
    tokenizer.save_pretrained(folder)
    return None


def _network_of(model: nn.Module) -> Any:
    """Return the model of transformers that a run's model is. Raises ModelError."""
    network: Any = model.model if isinstance(model, Logits) else model
    if hasattr(network, "get_base_model"):  # one of peft
        network = network.get_base_model()
    transformers = import_package("transformers", "transformers")
    if not isinstance(network, transformers.PreTrainedModel):
        raise ModelError(
            f"format={ADAPTER} and {MERGED} are for models of transformers, and the run's is a "
            f"{type(network).__name__}: use format=safetensors, or another"
        )
    return network


def _write_adapter(network: Any, folder: Path) -> str:
    """Write the adapter of a model as peft does; return where its frozen model is read from."""
    configs = getattr(network, "peft_config", None)
    if not configs:
        raise ModelError(
            f"format={ADAPTER}: the run has no adapters, all its weights were trained: use "
            f"format={MERGED}"
        )
    base = network.name_or_path
    if not base:
        raise ModelError(
            f"format={ADAPTER}: the frozen model was made anew (model.config), so that nobody "
            f"else has it: use format={MERGED}"
        )
    if Path(base).is_dir():
        base = str(Path(base).absolute())
    peft = import_package("peft", "peft")
    (adapter,) = configs
    config = copy(configs[adapter])
    config.base_model_name_or_path = base
    config.inference_mode = True
    if isinstance(config.target_modules, set):
        config.target_modules = sorted(config.target_modules)  # the same file each time
    if type(network).__name__.endswith("ForCausalLM"):
        config.task_type = "CAUSAL_LM"
    # The embedding is part of the frozen model: peft would ask the hub whether it was resized.
    weights = peft.get_peft_model_state_dict(
        network, adapter_name=adapter, save_embedding_layers=False
    )
    named = {f"{_MODULE}{weight}": value for weight, value in weights.items()}
    write_safetensors(folder / FOLDERS[ADAPTER], named)
    config.save_pretrained(folder)
    return str(base)


def _write_merged(network: Any, folder: Path) -> None:
    """Write a model as transformers does; its adapters are added to the weights of a copy."""
    if getattr(network, "peft_config", None):
        layer_type = import_package("peft", "peft").tuners.tuners_utils.BaseTunerLayer
        # In single precision: in the 8 bits of bfloat16 a sum would lose what was learnt.
        network = _precise(deepcopy(network))
        merged = list[str]()
        for name, layer in list(network.named_modules()):
            # The experts of a layer have one adapter within another, which are merged together.
            is_inner = any(name.startswith(f"{outer}.") for outer in merged)
            if isinstance(layer, layer_type) and not is_inner:
                network.set_submodule(name, _merged_layer(layer))
                merged.append(name)
        del network.peft_config
    transformers = import_package("transformers", "transformers")
    if network.can_generate() and network.name_or_path:
        # How the original ends and samples its answers: a run's model knows its defaults alone.
        with suppress(OSError, ValueError):
            stored = transformers.GenerationConfig.from_pretrained(network.name_or_path)
            stored.validate(strict=True)
            network.generation_config = stored
    try:
        network.save_pretrained(folder, max_shard_size=_ONE_FILE)
    except ValueError as error:
        raise ModelError(
            f"format={MERGED}: transformers does not write the model: {short_line(error)}"
        ) from error


def _merged_layer(layer: Any) -> nn.Module:
    """Return the layer that adapters are on, with what they have learnt added to its weights."""
    own = getattr(layer, "unload_and_optionally_merge_module", None)
    if own is not None:
        merged: nn.Module = own(merge=True, safe_merge=False, adapter_names=None)
        return merged
    layer.merge()
    base: nn.Module = layer.get_base_layer()
    return base


def _precise(model: Any) -> Any:
    """Return a model in evaluation mode; one in half precision as a copy in single precision."""
    if next(model.parameters()).dtype in _HALF:
        model = in_format(deepcopy(model), torch.float32)
    return model.eval()
