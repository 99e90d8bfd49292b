"""Kill a run again and again and see that nothing is lost: `python tests/tools/soak.py`.

Trains a small job once undisturbed, then the same job killed (SIGKILL to its process
group) at random moments, writing of checkpoints included, and resumed each time. At every moment
`last.pt` must load, after every kill each checkpoint must be whole, and at the end the two runs
must be equal bit by bit: weights, optimizer, random states, metrics, TensorBoard.
"""

import argparse
import contextlib
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from regimen.trainer.checkpoints.reader import read_checkpoint
from regimen.trainer.checkpoints.store import CheckpointStore
from regimen.trainer.errors import RunError
from same_run import differences, digest_of, repeated_steps

# BatchNorm, dropout, augmentation in two workers, an average of weights, a scheduler: whatever
# has a state. A checkpoint after each update, and logging and validation at odds with the epochs.
JOB = [
    "experiment=resnet18",
    "model=small_cnn",
    "model.dropout=0.2",
    "callbacks=[default,ema]",
    "loader.num_workers=2",
    "trainer.log_every_n_steps=3",
    "trainer.validate_every_n_steps=7",
    "callbacks.checkpoint.every_n_steps=1",
]
STEPS_PER_EPOCH = 20
STEPS_BETWEEN_KILLS = 5  # on average, with room to spare
PATIENCE = 300.0  # seconds without a new checkpoint: the run hangs


@dataclass(slots=True)
class Tally:
    """What the kills hit."""

    while_writing: int = 0  # a temporary file was left behind
    before_resuming: int = 0  # no new checkpoint since the start
    loads_of_last: int = 0  # while the run lived
    steps: list[int] = field(default_factory=list)  # the newest checkpoint at each kill


class SoakError(RunError):
    """Something was lost."""


def main(argv: Sequence[str] | None = None) -> int:
    """Soak and return the exit code: 0 if nothing was lost."""
    parser = argparse.ArgumentParser(prog="python tests/tools/soak.py", description=__doc__)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0, help="of the moments")
    parser.add_argument("--folder", type=Path, help="keep both runs here")
    parser.add_argument("overrides", nargs="*", help="changes to the job, as for train")
    arguments = parser.parse_args(argv)
    with tempfile.TemporaryDirectory(prefix="soak-") as scratch:
        folder = arguments.folder or Path(scratch)
        try:
            tally = soak(folder, arguments.kills, arguments.seed, arguments.overrides)
        except RunError as error:
            print(f"error: {error}", file=sys.stderr)
            return 1
        print(
            f"{len(tally.steps)} kills, {tally.while_writing} of them while a file was written, "
            f"{tally.before_resuming} before a new checkpoint; last.pt loaded "
            f"{tally.loads_of_last} times meanwhile; nothing was lost: both runs end in state "
            f"{digest_of(folder / 'killed')[:16]}"
        )
    return 0


def soak(folder: Path, kills: int, seed: int, overrides: Sequence[str] = ()) -> Tally:
    """Run the job undisturbed in `folder/whole` and killed in `folder/killed`, and compare.

    Raises SoakError, or what the verification of a checkpoint raises.
    """
    epochs = max(2, -(-(kills + 1) * STEPS_BETWEEN_KILLS // STEPS_PER_EPOCH))
    job = [*JOB, f"trainer.max_epochs={epochs}", *overrides]
    whole = folder / "whole"
    killed = folder / "killed"
    folder.mkdir(parents=True, exist_ok=True)
    tally = Tally()
    generator = random.Random(seed)
    for number in range(kills):
        _disturb(job, killed, tally, generator, in_writing=number % 2 == 0)
        print(f"kill {number + 1}: the newest checkpoint is of step {tally.steps[-1]}", flush=True)
    for run in (whole, killed):
        with _started(job, run) as process:
            if process.wait():
                raise SoakError(f"{run} ended with {process.returncode}: {_said(run)}")
    found = [*differences(whole, killed), *repeated_steps(killed)]
    if found:
        raise SoakError("the runs differ: " + "; ".join(found))
    if _temporary(killed):
        raise SoakError(f"{killed}: remains of killed writers were not removed")
    return tally


def _disturb(
    job: Sequence[str], run: Path, tally: Tally, generator: random.Random, in_writing: bool
) -> None:
    """Start or resume the run, kill it at some moment, and verify what is left."""
    ahead = generator.randrange(STEPS_BETWEEN_KILLS + 1)
    delay = generator.random() * (0.1 if ahead else 5.0)
    with _started(job, run) as process:
        _follow(process, run, ahead, tally)
        left = _temporary(run)
        if not in_writing:
            time.sleep(delay)
        while in_writing and process.poll() is None and _temporary(run) <= left:
            pass  # until the first sight of a new temporary file
    tally.before_resuming += not ahead
    tally.while_writing += bool(_temporary(run))
    for path in sorted((run / "checkpoints").glob("*.pt")):
        read_checkpoint(path)
    _, payload, problems = CheckpointStore(run / "checkpoints").newest() or (None, None, None)
    if problems:
        raise SoakError("; ".join(problems))
    tally.steps.append(payload["state"]["counters"]["global_step"] if payload else 0)


def _follow(process: subprocess.Popen[str], run: Path, ahead: int, tally: Tally) -> None:
    """Wait for `ahead` new checkpoints, loading `last.pt` all the while."""
    start = _newest_step(run)
    deadline = time.monotonic() + PATIENCE
    while _newest_step(run) < start + ahead and process.poll() is None:
        if (run / "checkpoints" / "last.pt").exists():
            read_checkpoint(run / "checkpoints" / "last.pt")
            tally.loads_of_last += 1
        if time.monotonic() > deadline:
            raise SoakError(f"no new checkpoint in {PATIENCE:.0f} s after step {start}")
        time.sleep(0.002)
    if process.poll():
        raise SoakError(f"a resumed run failed: {_said(run)}")


def _temporary(run: Path) -> set[str]:
    with contextlib.suppress(FileNotFoundError):
        return {name for name in os.listdir(run / "checkpoints") if name.startswith(".tmp")}
    return set()


def _newest_step(run: Path) -> int:
    steps = [int(p.stem.removeprefix("step-")) for p in (run / "checkpoints").glob("step-*.pt")]
    return max(steps, default=0)


def _said(run: Path) -> str:
    return run.with_suffix(".out").read_text(encoding="utf-8")[-500:]


@contextlib.contextmanager
def _started(job: Sequence[str], run: Path) -> Iterator[subprocess.Popen[str]]:
    """Start or resume the run; it is killed on leaving, with the workers of its loader."""
    command = [sys.executable, "-m", "regimen.scripts.train", *job, f"run_dir={run}", "resume=auto"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with open(run.with_suffix(".out"), "a", encoding="utf-8") as out:
        process = subprocess.Popen(
            command, stdout=out, stderr=out, text=True, env=environment, start_new_session=True
        )
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


if __name__ == "__main__":
    sys.exit(main())
