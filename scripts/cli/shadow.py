"""Check that no other package shadows one of our six packages, whose names are common words.

Imports none of our modules: it runs before anything else is imported.
"""

import os
import runpy
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def refuse_shadows() -> None:
    """Exit with code 2 if another package shadows one of ours."""
    _move_working_folder()
    # By its file: `import trainer` might run the other package.
    ours = runpy.run_path(str(ROOT / "trainer" / "shadow.py"))
    try:
        ours["refuse_shadows"]()
    except ImportError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)


def clashes() -> list[str]:
    """Return the packages in the working directory that ours shadow."""
    from regimen.trainer.shadow import PACKAGES

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
    """Move the working directory to the end of sys.path; `python -m` puts it first."""
    here = os.path.realpath(os.getcwd())
    if here == str(ROOT):
        return
    if sys.path and os.path.realpath(sys.path[0] or ".") == here and not sys.flags.safe_path:
        sys.path.append(sys.path.pop(0) or here)
