"""The packages that the steps need, on a machine that can install nothing. Needs no torch.

A wheel is an archive of modules, so a folder on the path is all that it has to be unpacked into.
"""

import importlib.metadata as metadata
import re
import zipfile
from collections.abc import Iterable
from pathlib import Path

# Versions that are known to work; a machine may have others that `pyproject.toml` allows.
WANTED = {
    "torch": "2.11.0",
    "torchvision": "0.26.0",
    "hydra-core": "1.3.8",
    "omegaconf": "2.3.1",
    "antlr4-python3-runtime": "4.9.3",
    "tensorboard": "2.20.0",
    "safetensors": "0.6.2",
    "tqdm": "4.67.1",
    "scikit-learn": "1.7.2",
    "numpy": "2.3.5",
    "pillow": "11.3.0",
    "pyyaml": "6.0.3",
    "packaging": "25.0",
    "fsspec": "2026.6.0",
    "pytest": "8.4.2",  # of the step `tests`
}
# What torch itself needs is there if torch is.
_OTHERS_BUSINESS = ("torch", "torchvision")


def normalized(name: str) -> str:
    """Return a distribution's name as the package index spells it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def missing(site: Path | None = None) -> list[str]:
    """Return the names of packages that are neither installed nor in the folder `site`.

    What the packages that are there need themselves counts as well; where a requirement depends on
    the system or on an extra it is not looked at.
    """
    there = _distributions(site)
    lacking = []
    queue = list(WANTED)
    seen = set(queue)
    while queue:
        name = queue.pop(0)
        if name not in there:
            lacking.append(name)
        elif name not in _OTHERS_BUSINESS:
            needed = [normalized(own) for own in _required(there[name]) if normalized(own)]
            queue += [own for own in needed if own not in seen]
            seen.update(needed)
    return lacking


def unpack(folder: Path, site: Path) -> list[str]:
    """Unpack those wheels of a folder whose package is not installed; return their file names."""
    there = _distributions(None)
    unpacked = []
    for wheel in sorted(folder.glob("*.whl")):
        name = normalized(wheel.name.partition("-")[0])
        if name not in there:
            with zipfile.ZipFile(wheel) as archive:
                archive.extractall(site)
            unpacked.append(wheel.name)
    return unpacked


def advice(names: Iterable[str], folder: Path) -> str:
    """Return how to get the wheels of some packages, as text to be printed."""
    words = []
    for name in names:
        words.append(f"{name}=={WANTED[name]}" if name in WANTED else name)
    return (
        f"missing: {', '.join(words)}\n"
        "On a machine with a network and the same Python, the wheels are made by\n"
        f"    python3 -m pip wheel --no-deps --wheel-dir WHEELS {' '.join(words)}\n"
        "(antlr4-python3-runtime is published as source only: `pip wheel` builds its wheel).\n"
        f"Copy that folder here and name it by WHEELS=DIR; looked in: {folder}"
    )


def _distributions(site: Path | None) -> dict[str, metadata.Distribution]:
    every = list(metadata.distributions())
    if site is not None:
        every += metadata.distributions(path=[str(site)])
    return {normalized(one.metadata["Name"]): one for one in every if one.metadata["Name"]}


def _required(distribution: metadata.Distribution) -> list[str]:
    names = []
    for requirement in distribution.requires or []:
        found = re.match(r"[\w.-]+", requirement)
        if found and ";" not in requirement:
            names.append(found[0])
    return names
