"""Two processes that add their ranks up: `python -m scripts.checkup.pair RANK BACKEND FILE`."""

import subprocess
import sys
import tempfile
from collections.abc import Sequence
from datetime import timedelta

from scripts.checkup.finding import Finding

_SECONDS = 120  # two imports of torch on a busy machine are part of it
_GROUP_SECONDS = 30


def pair(backend: str) -> Finding:
    """Let two processes of this machine meet; a warning where they do not."""
    name = f"two processes ({backend})"
    with tempfile.TemporaryDirectory() as folder:
        commands = [
            [sys.executable, "-P", "-m", "scripts.checkup.pair", str(n), backend, f"{folder}/store"]
            for n in range(2)
        ]
        failure = run_together(commands, _SECONDS)
    if failure is None:
        return Finding(name, "found each other and added up their numbers")
    variable = {"gloo": "GLOO_SOCKET_IFNAME", "nccl": "NCCL_SOCKET_IFNAME"}[backend]
    cure = f"let this host's name resolve (/etc/hosts), or {variable}=lo; strategy=single works"
    return Finding(name, failure, cure)


def run_together(commands: Sequence[Sequence[str]], seconds: float) -> str | None:
    """Run commands at the same time; return what failed, None if nothing did. None outlives it."""
    processes = [
        subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        for command in commands
    ]
    try:
        said = [process.communicate(timeout=seconds)[1] for process in processes]
    except subprocess.TimeoutExpired:
        return f"they did not find each other within {seconds:g} s"
    finally:
        for process in processes:
            process.kill()
            process.wait()
    failed = [text for process, text in zip(processes, said, strict=True) if process.returncode]
    return (failed[0].strip().splitlines() or ["no reason given"])[-1] if failed else None


def main() -> None:
    """Be one of the two."""
    import torch
    import torch.distributed as dist

    rank, backend, store = int(sys.argv[1]), sys.argv[2], sys.argv[3]
    device = f"cuda:{rank}" if backend == "nccl" else "cpu"
    dist.init_process_group(
        backend,
        init_method=f"file://{store}",
        rank=rank,
        world_size=2,
        timeout=timedelta(seconds=_GROUP_SECONDS),
    )
    number = torch.tensor([rank + 1.0], device=device)
    dist.all_reduce(number)
    dist.destroy_process_group()
    if number.item() != 3.0:
        raise SystemExit(f"1 + 2 was {number.item()}")


if __name__ == "__main__":
    main()
