"""One of the processes that `scripts.launch` starts."""

from __future__ import annotations

import json
import os
import time
import traceback
from dataclasses import replace
from pathlib import Path

from scripts.console import describe, exit_code, log_to_stderr
from scripts.request import Request


def work(request: Request, notes: str) -> int:
    """Run a request as one rank; how it failed is left for the parent in the folder `notes`."""
    from scripts.run import run
    from trainer.errors import Interrupted

    rank, folder = int(os.environ["RANK"]), Path(notes)
    log_to_stderr(rank == 0)
    try:
        return run(_restarted(request, folder), folder / "run_dir")
    except BaseException as error:
        _report(error, folder / f"rank-{rank}.json")
        if isinstance(error, Interrupted):  # not a failure that a restart could mend
            return error.exit_code
        raise SystemExit(exit_code(error)) from None


def _restarted(request: Request, folder: Path) -> Request:
    """Go on from the last checkpoint after a restart."""
    place = folder / "run_dir"
    if os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0" or not place.exists():
        return request
    return replace(
        request, config={**request.config, "run_dir": place.read_text(), "resume": "auto"}
    )


def _report(error: BaseException, path: Path) -> None:
    content = {
        "code": exit_code(error),
        "text": describe(error),
        "time": time.time(),
        "traceback": "".join(traceback.format_exception(error)),
    }
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(content))
    temporary.replace(path)
