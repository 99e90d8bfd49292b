"""Tokenizers of the package `transformers`."""

from typing import Any

from regimen.conf.errors import ConfigError
from regimen.data.errors import import_package, short_line


def load_tokenizer(name: str) -> Any:
    """Load a tokenizer of a folder, or by its name on the hub; no code of it is run.

    Raises ConfigError for `data.tokenizer` where there is none.
    """
    transformers = import_package("transformers", "transformers")
    try:
        return transformers.AutoTokenizer.from_pretrained(name, trust_remote_code=False)
    except (OSError, ValueError, KeyError) as error:
        if "trust_remote_code" in str(error):
            raise ConfigError(
                "data.tokenizer",
                f"{name} is written in Python code of its own, which is not run",
                "take a tokenizer of a class that transformers has",
            ) from error
        raise ConfigError("data.tokenizer", f"{name}: {short_line(error)}") from error
