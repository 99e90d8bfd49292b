"""The lines of Python that load exported weights."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trainer.export.folder import FACTS

_FINE_TUNED = "models.pretrained.fine_tune"  # returns the network that it is given


def how_to_load(folder: Path) -> list[str]:
    """Return three lines that load weights without Regimen's trainer."""
    facts = json.loads((folder / FACTS).read_text(encoding="utf-8"))
    imports: dict[str, None] = {"from safetensors.torch import load_file": None}
    model = _spelled(facts["model"], imports)
    return [
        "; ".join(imports),
        f"model = {model}",
        f"model.load_state_dict(load_file({str(folder.absolute() / facts['file'])!r}))",
    ]


def _spelled(value: Any, imports: dict[str, None]) -> str:
    """Return the Python that makes a node's object; `imports` grows by what it needs."""
    if isinstance(value, Mapping):
        return _called(value, imports) if "_target_" in value else _mapping(value, imports)
    if isinstance(value, list):
        return f"[{', '.join(_spelled(part, imports) for part in value)}]"
    return repr(value)


def _mapping(value: Mapping[str, Any], imports: dict[str, None]) -> str:
    parts = (f"{key!r}: {_spelled(part, imports)}" for key, part in value.items())
    return "{" + ", ".join(parts) + "}"


def _called(node: Mapping[str, Any], imports: dict[str, None]) -> str:
    if node["_target_"] == _FINE_TUNED:
        return _spelled(node["model"], imports)
    module, name = _module_and_name(str(node["_target_"]))
    imports[f"from {module} import {name.partition('.')[0]}"] = None
    own = {k: v for k, v in node.items() if not k.startswith("_")}
    own |= {key: None for key in ("weights",) if key in own}  # those of the file take their place
    own |= {key: False for key in ("pretrained",) if key in own}
    words = [_spelled(part, imports) for part in node.get("_args_", ())]
    words += [f"{key}={_spelled(part, imports)}" for key, part in own.items()]
    return f"{name}({', '.join(words)})"


def _module_and_name(target: str) -> tuple[str, str]:
    """Split a target at the end of its module, which is imported since the model was built."""
    parts = target.split(".")
    for end in range(len(parts) - 1, 0, -1):
        if (module := ".".join(parts[:end])) in sys.modules:
            return module, ".".join(parts[end:])
    return ".".join(parts[:-1]), parts[-1]
