"""Write a resolved configuration so that composing it again gives the very same values."""

import re
from typing import Any, ClassVar

import yaml

from conf.reserved import RESERVED, placeholder

# Words that OmegaConf, or our own reading of YAML, take for something else than text.
_NOT_TEXT = re.compile(
    r"[-+]?(\d[\d_]*)?\.?[\d_]*([eE][-+]?\d+)?|(?i:yes|no|on|off|y|n)|[-+]?\d[\d_]*(:[0-5]?\d)+.*"
    r"|\?\?\?"
)


def _text(dumper: Any, value: str) -> yaml.Node:
    style = "'" if _NOT_TEXT.fullmatch(value) else None
    if not value.isprintable():
        style = '"'  # the only one in which YAML can escape characters
    node: yaml.Node = dumper.represent_scalar("tag:yaml.org,2002:str", value, style=style)
    return node


class _Dumper(yaml.SafeDumper):
    yaml_representers: ClassVar = {**yaml.SafeDumper.yaml_representers, str: _text}

    def ignore_aliases(self, data: Any) -> bool:
        """Write everything out: nobody wants to read an anchor."""
        return True


def dump(config: dict[str, Any]) -> str:
    """Return plain containers as YAML that `--config-name` reads back unchanged."""
    text: str = yaml.dump(
        _escaped(config), Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=100
    )
    return text


def _escaped(node: Any) -> Any:
    if isinstance(node, dict):
        return {key: _escaped(value) for key, value in node.items()}
    if isinstance(node, list | tuple):
        return [_escaped(value) for value in node]
    return escape(node) if isinstance(node, str) else node


def escape(text: str) -> str:
    """Protect `${` in text that is final, so that it is not resolved again.

    The reserved names stay open: they are filled in after the configuration was read.
    """
    head, *rest = text.split("${")
    for part in rest:
        if any(f"${{{part}".startswith(placeholder(name)) for name in RESERVED):
            head = f"{head}${{{part}"
        else:
            # Backslashes right before an interpolation are halved when it is read: double them.
            slashes = len(head) - len(head.rstrip("\\"))
            head = f"{head}{chr(92) * slashes}{chr(92)}${{{part}"
    return head


def word(value: object) -> str:
    """Return a single value as a command line writes it: `null`, `true`, `0.1`."""
    words = {None: "null", True: "true", False: "false"}
    return words[value] if value is None or isinstance(value, bool) else str(value)
