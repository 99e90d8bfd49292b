"""Tokenizers of transformers. Code that a folder of one brings runs only if that is allowed."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from regimen.conf.errors import ConfigError
from regimen.data.errors import import_package, reason, short_line

_allowed = False


def allow_remote_code(allowed: bool) -> None:
    """Let this process run code of tokenizers and models, as `--allow-remote-code` does, or not."""
    global _allowed
    _allowed = allowed


def remote_code_allowed() -> bool:
    """Return whether code that a tokenizer or a model brings may run in this process."""
    return _allowed


@contextmanager
def refuse_remote_code(key: str, name: str) -> Iterator[None]:
    """Say how code may run where transformers has refused that of a folder: raises ConfigError.

    Errors of other kinds pass.
    """
    try:
        yield
    except (OSError, ValueError, KeyError) as error:
        # transformers has no class for it; each of its messages names the argument.
        if "trust_remote_code" not in str(error):
            raise
        raise ConfigError(
            key,
            f"{name} is written in Python code of its own, which is not run",
            "take one of a class that transformers has; if you trust the code, --allow-remote-code "
            "on the command line runs it",
        ) from error


def require_available(key: str, name: str) -> None:
    """Raise ConfigError for what is neither a folder nor known to a hub that answers.

    transformers asks a hub that does not answer for half a minute, and then names no folder.
    """
    if Path(name).is_dir():
        return
    hub = import_package("huggingface_hub", "transformers")
    hint = (
        "give the folder that save_pretrained wrote, or a name that the hub or its cache has "
        "(HF_HOME; HF_HUB_OFFLINE=1 asks the cache alone, HF_ENDPOINT names another hub)"
    )
    try:
        for file in ("config.json", "tokenizer_config.json"):
            if hub.try_to_load_from_cache(name, file) is not None:
                return
        # One question; what a hub answers transformers understands better.
        hub.get_hf_file_metadata(hub.hf_hub_url(name, "config.json"))
    except (hub.errors.HfHubHTTPError, hub.errors.FileMetadataError):
        return
    except hub.errors.HFValidationError as error:
        raise ConfigError(
            key, f"there is no folder {name}, which is no name of the hub", hint
        ) from error
    except Exception as error:  # of the client that huggingface_hub uses, httpx or httpx2
        raise ConfigError(
            key,
            f"there is no folder {name}, and the hub does not answer: {short_line(error)}",
            hint,
        ) from error


def require_name(name: str | None) -> str:
    """Return the name of a tokenizer. Raises ConfigError where there is none."""
    if name is None:
        raise ConfigError(
            "data.tokenizer",
            "is null: nothing names a tokenizer",
            "set data.tokenizer=DIR, or model.name=DIR of a model that has one",
        )
    return name


def load_tokenizer(name: str | None) -> Any:
    """Load a tokenizer from a folder or by its name on the hub. Raises ConfigError."""
    name = require_name(name)
    transformers = import_package("transformers", "transformers")
    require_available("data.tokenizer", name)
    try:
        with refuse_remote_code("data.tokenizer", name):
            return transformers.AutoTokenizer.from_pretrained(name, trust_remote_code=_allowed)
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError("data.tokenizer", f"{name}: {short_line(error)}") from error


def load_fast_tokenizer(name: str | None, purpose: str) -> Any:
    """Load a tokenizer that knows the characters of its tokens, by which `purpose`.

    Raises ConfigError.
    """
    tokenizer = load_tokenizer(name)
    if not tokenizer.is_fast:
        raise ConfigError(
            "data.tokenizer",
            f"{name}: {type(tokenizer).__name__} does not tell the characters of its tokens, by "
            f"which {purpose}",
            "take one with a tokenizer.json",
        )
    return tokenizer


def read_template(file: str) -> str:
    """Return the chat template in a file. Raises ConfigError."""
    try:
        return Path(file).expanduser().read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError("data.template", f"{file}: {reason(error)}") from error
