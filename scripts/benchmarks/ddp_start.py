"""How long a group of two processes takes to its first update: ours, and a script by torchrun.

Whole commands, from the call to the first update: `train ... strategy=ddp`, and `by_hand/ddp.py`.
"""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from trainer.callback import Callback
from trainer.trainer import Trainer

STARTS = 3
_PLAIN = Path(__file__).with_name("by_hand") / "ddp.py"


@dataclass(frozen=True, slots=True)
class Start:
    """Seconds to the first update, and CPU seconds of all processes to the end of the command."""

    wall: float
    cpu: float


class FirstUpdate(Callback):
    """Write down when the first update is done."""

    def __init__(self, path: str) -> None:
        self._path = Path(path)

    def on_update_end(self, trainer: Trainer) -> None:
        """Write once."""
        if trainer.is_main and trainer.state.updates == 1:
            self._path.write_text(str(time.time()))


def measure_starts() -> list[tuple[Start, Start]]:
    """Return the seconds to the first update: ours, and those of a script by torchrun."""
    with tempfile.TemporaryDirectory() as folder:
        mark = Path(folder) / "mark"
        plain = ["-m", "torch.distributed.run", "--nproc-per-node", "2", str(_PLAIN), str(mark)]
        ours = [
            *("-m", "scripts.train", "experiment=resnet18", "model=mlp", "loader.num_workers=0"),
            *("strategy=ddp", "strategy.devices=2", "trainer.max_steps=1"),
            *("trainer.limit_val_batches=0", "trainer.limit_test_batches=0"),
            *("callbacks.checkpoint=null", "callbacks.early_stopping=null", "--allow-target"),
            *(
                "scripts.benchmarks.ddp_start",
                "+callbacks.mark._target_=scripts.benchmarks.ddp_start.FirstUpdate",
            ),
            f"+callbacks.mark.path={mark}",
        ]
        return [(_start(ours, mark), _start(plain, mark)) for _ in range(STARTS)]


def _start(arguments: Sequence[str], mark: Path) -> Start:
    mark.unlink(missing_ok=True)
    began, used = time.time(), _cpu_of_children()
    subprocess.run(
        [sys.executable, *arguments],
        cwd=mark.parent,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        check=True,
    )
    return Start(float(mark.read_text()) - began, _cpu_of_children() - used)


def _cpu_of_children() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime
