"""A job on the machine that a cluster has chosen: run `train` and forward signals to it.

Only the folder of the sweep is shared; it must be on a file system that all machines see.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from scripts.cli.console import end_with_parent
from scripts.cli.job import AS_JOB
from scripts.sweeps.launchers.launcher import TRAIN, Launch
from trainer.runs.status import holds_run

_PATIENCE = 0.1  # seconds between two checks of the job; signals are handled in between


@dataclass(slots=True)
class NodeJob:
    """A picklable job; a call runs it and returns the exit code of `train`."""

    argv: Sequence[str]
    run_dir: str
    output: str
    folder: str  # the working directory of the sweep
    module: str = TRAIN
    process: "subprocess.Popen[bytes] | None" = field(default=None, compare=False)

    @classmethod
    def of(cls, launch: Launch) -> "NodeJob":
        """Return the job of a launch, with absolute paths."""
        run_dir, output = os.path.abspath(launch.run_dir), os.path.abspath(launch.output)
        return cls(list(launch.argv), run_dir, output, os.getcwd(), TRAIN)

    def __call__(self) -> int:
        """Run the job; one that has begun is resumed, on whichever machine it ran before."""
        output = Path(self.output)
        output.parent.mkdir(exist_ok=True)
        with output.open("ab") as file:
            self.process = subprocess.Popen(
                [sys.executable, "-P", "-m", self.module, *self.words()],
                cwd=self.folder,
                env={**os.environ, **AS_JOB},
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                process_group=0,
                preexec_fn=_prepare,
            )
        try:
            while self.process.poll() is None:
                time.sleep(_PATIENCE)
        except KeyboardInterrupt:  # as Ray cancels a task
            self.stop(signal.SIGTERM)
        return self.process.wait()

    def words(self) -> list[str]:
        """Return the arguments of `train`."""
        if not holds_run(Path(self.run_dir)):
            return list(self.argv)
        return [*(w for w in self.argv if not w.startswith("resume=")), "resume=auto"]

    def stop(self, number: int) -> None:
        """Make the job save and end, and wait for its end."""
        if self.process is None or self.process.returncode is not None:
            return
        self.process.send_signal(number)
        # Popen.wait() takes a lock that the interrupted code may hold.
        with suppress(ChildProcessError):  # that code was quicker
            os.waitid(os.P_PID, self.process.pid, os.WEXITED | os.WNOWAIT)

    def checkpoint(self) -> Any:
        """Save before a preemption or the time limit; submitit queues the rest of the job again."""
        from submitit.helpers import DelayedSubmission

        self.stop(signal.SIGUSR1)
        return DelayedSubmission(replace(self, process=None))


def _prepare() -> None:
    end_with_parent(signal.SIGTERM)
    # SLURM sends submitit's signal to every process; `stop` sends one that `train` handles.
    signal.signal(signal.SIGUSR2, signal.SIG_IGN)
