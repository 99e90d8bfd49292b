"""Start a run's processes through torch's elastic launcher, and answer for them."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import tempfile
import uuid
from pathlib import Path
from typing import Any

from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from scripts.rank import work
from scripts.request import Request
from trainer.run_directory import amend_failure

_PEER = 6  # a process that was lost, or that lost another


def launch(request: Request) -> int:
    """Run a request in `strategy.devices` processes and return the run's exit code."""
    strategy = request.config["strategy"]
    processes = _count(strategy)
    # As torchrun does: processes share the cores.
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // processes)))
    notes = Path(tempfile.mkdtemp(prefix="regimen-"))
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=processes,
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=strategy["max_restarts"],
        start_method="spawn",
        # Ctrl-C reaches the processes from the terminal itself.
        signals_to_handle="SIGTERM,SIGHUP,SIGUSR1",
    )
    try:
        return int(elastic_launch(config, work)(request, str(notes))[0])
    except (ChildFailedError, SignalException, KeyboardInterrupt) as error:
        return _answer(error, notes)
    finally:
        shutil.rmtree(notes, ignore_errors=True)


def _count(strategy: dict[str, Any]) -> int:
    devices = strategy["devices"]
    if isinstance(devices, list):
        return len(devices)
    if devices != "auto":
        return int(devices)
    import torch

    return max(1, torch.cuda.device_count())


def _answer(error: BaseException, notes: Path) -> int:
    """Say once what went wrong first, and return its code."""
    reports = sorted(
        (json.loads(path.read_text()) for path in notes.glob("rank-*.json")),
        key=lambda report: (report["code"] == _PEER, report["time"]),
    )
    lost = _lost(error)
    if lost is not None and (not reports or reports[0]["code"] == _PEER):
        first: dict[str, Any] = {"code": _PEER, "text": lost, "traceback": ""}
    elif reports:
        first = reports[0]
    else:
        first = {"code": 130, "text": "stopped before the processes had started", "traceback": ""}
    if first["code"] == 1:
        print(first["traceback"], file=sys.stderr)
    print(f"error: {first['text']}", file=sys.stderr)
    place = notes / "run_dir"
    if place.exists():
        amend_failure(Path(place.read_text()), first["code"], first["text"])
    return int(first["code"])


def _lost(error: BaseException) -> str | None:
    """Name the process that a signal killed, if one was."""
    if not isinstance(error, ChildFailedError):
        return None
    killed = {r: f for r, f in error.failures.items() if f.exitcode < 0}
    for rank, failure in sorted(killed.items(), key=lambda pair: pair[1].timestamp):
        name = signal.Signals(-failure.exitcode).name
        return f"process {rank} (pid {failure.pid}) was killed by {name}"
    return None
