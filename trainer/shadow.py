"""Check that no other package stands where one of our six, whose names are common words, belongs.

Runs when `trainer` is imported, in scripts and notebooks too: imports none of our modules.
"""

import importlib.util
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("conf", "trainer", "models", "data", "callbacks", "scripts")


def refuse_shadows() -> None:
    """Raise ImportError if another package or file is found where one of ours is imported."""
    for name in PACKAGES:
        if (place := _place(name)) != ROOT / name:
            found = f"is taken by {place}" if place else "is not installed"
            raise ImportError(
                f"the package {name!r} {found}, but Regimen needs its own in {ROOT}: rename the "
                "other one, or remove its folder from PYTHONPATH",
                name=name,
            )


def _place(name: str) -> Path | None:
    """Return the folder or file that `import name` would load."""
    try:
        spec = importlib.util.find_spec(name)
    except ValueError:  # a module that was made by hand
        return None
    if spec is None:
        return None
    if spec.submodule_search_locations:
        return Path(next(iter(spec.submodule_search_locations))).resolve()
    return Path(spec.origin).resolve() if spec.origin else None
