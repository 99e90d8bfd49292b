"""Kill a run again and again and see that nothing is lost: `python -m scripts.soak --help`.

The tool itself belongs to the tests, `tests/tools/soak.py`: this runs it under its known name.
"""

import os
import sys
from pathlib import Path

TOOL = Path(__file__).resolve().parents[1] / "tests" / "tools" / "soak.py"


def main() -> None:
    """Become the tool."""
    os.execv(sys.executable, [sys.executable, str(TOOL), *sys.argv[1:]])


if __name__ == "__main__":
    main()
