"""Read the YAML texts that Regimen wrote itself."""

from typing import Any

import yaml

_LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # of libyaml, where it is


def own_values(text: str) -> Any:
    """Return the values of a text."""
    return yaml.load(text, Loader=_LOADER)
