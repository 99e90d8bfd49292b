"""Make sure that our six packages, whose names are common words, are really ours.

Imports nothing of ours: it runs before anything else is imported.
"""

import importlib.machinery
import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("conf", "trainer", "models", "data", "callbacks", "scripts")


def refuse_shadows() -> None:
    """Leave with exit code 2 if another package takes the place of one of ours."""
    _move_working_folder()
    for name in PACKAGES:
        place = _place(name)
        if place is None or place.parent != ROOT:
            found = f"is taken by {place}" if place else "is not installed"
            print(
                f"error: the package {name!r} {found}, but Regimen needs its own in {ROOT}:"
                " rename the other one, or take its folder off PYTHONPATH",
                file=sys.stderr,
            )
            sys.exit(2)


def clashes() -> list[str]:
    """Name the packages in the working folder that ours hide from `_target_`s."""
    folder = Path.cwd().resolve()
    if folder == ROOT:
        return []
    return [
        f"{folder / name} has the name of one of Regimen's packages: no _target_ can reach it;"
        " rename it"
        for name in PACKAGES
        if any((folder / name).glob("*.py")) or (folder / f"{name}.py").exists()
    ]


def _move_working_folder() -> None:
    """Put the working folder behind what is installed; `python -m` puts it in front."""
    here = os.path.realpath(os.getcwd())
    if here == str(ROOT):
        return
    if sys.path and os.path.realpath(sys.path[0] or ".") == here and not sys.flags.safe_path:
        sys.path.append(sys.path.pop(0) or here)


def _place(name: str) -> Path | None:
    """Return the folder or file that `import name` takes."""
    module = sys.modules.get(name)
    spec = module.__spec__ if module else importlib.machinery.PathFinder.find_spec(name)
    if spec is None:
        return None
    if spec.submodule_search_locations:
        return Path(next(iter(spec.submodule_search_locations))).resolve()
    return Path(spec.origin).resolve() if spec.origin else None
