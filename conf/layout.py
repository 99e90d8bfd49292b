"""Where the packages of Regimen lie, in a checkout or an installed copy, and where that is from."""

import json
from importlib import metadata
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("conf", "trainer", "models", "data", "callbacks", "scripts")
# As `pip` knows it: `regimen` on the package index is a project of others.
DISTRIBUTION = "torch-regimen"


def is_checkout() -> bool:
    """Whether this code lies in a checkout of the sources, not in an installed copy."""
    return (ROOT / "src" / "regimen" / "README.md").is_file()


def installed_version() -> str:
    """Return the version that is installed; "not installed" where the code is only on the path."""
    try:
        return metadata.version(DISTRIBUTION)
    except metadata.PackageNotFoundError:
        return "not installed"


def installed_from() -> dict[str, Any]:
    """Return the record that pip and uv leave of where a copy came from; {} from an index.

    `url`, and either `vcs_info`, `dir_info` or `archive_info`:
    https://packaging.python.org/en/latest/specifications/direct-url
    """
    try:
        text = metadata.distribution(DISTRIBUTION).read_text("direct_url.json")
    except metadata.PackageNotFoundError:
        return {}
    return json.loads(text) if text else {}
