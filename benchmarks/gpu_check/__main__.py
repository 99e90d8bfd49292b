"""Check everything on a machine with one accelerator and no network, within ten minutes.

Each step is a process with a time limit of its own; one that fails ends no other. Into the folder
gpu_check/ go results.jsonl (one JSON a step, a line each, with card, driver and versions),
table.txt, log.txt and profiles.txt. The table comes last: step, expected, seen, ok.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.gpu_check.steps import STEPS, Step
from benchmarks.gpu_check.wheels import advice, missing, unpack

ROOT = Path(__file__).resolve().parents[2]
FILES = ("results.jsonl", "table.txt", "log.txt", "profiles.txt")  # few enough to be sent back
GRACE = 10  # seconds that a step has to end after its limit, before it is killed
SLOWER = 20  # times as long as a step may take on the simulated accelerator
MOST_LOG = 2**20  # bytes that are kept of a step's log
RUNNER = "benchmarks.gpu_check.step"
SIMULATION = "import accelerator, json; print(json.dumps(accelerator.environment()))"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the steps and print the table; return 0 where all that ran is as expected.

    1 where it is not, 2 for a mistake in the arguments or a package that is missing.
    """
    arguments = _arguments(argv)
    began = time.monotonic()
    folder = arguments.output
    folder.mkdir(parents=True, exist_ok=True)
    for name in FILES:
        (folder / name).unlink(missing_ok=True)
    with tempfile.TemporaryDirectory(prefix="gpu_check-") as scratch:
        environment = _environment(Path(scratch) / "site")
        if environment is None:
            return 2
        found = []
        for name in arguments.steps:
            left = arguments.budget - (time.monotonic() - began)
            result = _run(name, left, Path(scratch) / name, folder, environment)
            with (folder / "results.jsonl").open("a", encoding="utf-8") as file:
                file.write(json.dumps(result) + "\n")
            found.append(result)
    text = table(found)
    (folder / "table.txt").write_text(text + "\n", encoding="utf-8")
    print(f"\n{text}\nwritten to {folder}", flush=True)
    return int(any(result["ok"] is False for result in found))


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    steps = "\n".join(
        f"  {name:10}{step.seconds:4} s  {step.shows}" for name, step in STEPS.items()
    )
    parser = argparse.ArgumentParser(
        prog="benchmarks/gpu_check.sh",
        description=__doc__,
        epilog=f"steps, and about how long each takes:\n{steps}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--steps", type=_names, default=list(STEPS), help="some of them: a,b")
    budget = "seconds for all: what will not fit is left out from the end (default: 540)"
    parser.add_argument("--budget", type=float, default=540.0, help=budget)
    default = Path(os.environ.get("OUT", ".")) / "gpu_check"
    output = "the folder (default: gpu_check, in $OUT if that is set)"
    parser.add_argument("--output", type=Path, default=default, help=output)
    return parser.parse_args(argv)


def _names(text: str) -> list[str]:
    names = text.split(",")
    for name in names:
        if name not in STEPS:
            known = ", ".join(STEPS)
            raise argparse.ArgumentTypeError(f"there is no step {name!r}: there are {known}")
    return names


def _environment(site: Path) -> dict[str, str] | None:
    """Return the variables of the steps; None, with what to do printed, if a package is missing."""
    wheels = Path(os.environ.get("WHEELS") or ROOT / ".whl")
    if unpacked := unpack(wheels, site):
        print(f"unpacked from {wheels}: {', '.join(unpacked)}", flush=True)
    lacking = missing(site)
    if lacking:
        print(advice(lacking, wheels), flush=True)
    if any(name != "pytest" for name in lacking):
        return None
    # What the steps write lies in their own folders, wherever this was started.
    paths = [str(path) for path in (ROOT, ROOT / "src", ROOT / "tests" / "tools", site)]
    given = os.environ.get("PYTHONPATH")
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([*paths, *([given] if given else [])]),
    }
    if os.environ.get("SIMULATED") != "1":
        return environment
    command = [sys.executable, "-c", SIMULATION]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    simulated = json.loads(done.stdout.splitlines()[-1])["PYTHONPATH"]
    environment["PYTHONPATH"] += os.pathsep + simulated
    return environment


def _run(
    name: str, left: float, scratch: Path, folder: Path, environment: dict[str, str]
) -> dict[str, Any]:
    """Run a step within its limit and return its JSON."""
    step = STEPS[name]
    if step.seconds > left:
        print(f"{name}: left out", flush=True)
        return {"step": name, "ok": None, "checks": [], "left_out": f"{left:.0f} s are left"}
    scratch.mkdir()
    limit = _limit(step, left)
    print(f"{name}: {step.shows}", flush=True)
    # SIGINT ends a step in good order, so that tests end the processes that they have started.
    command = ["timeout", "--signal=INT", f"--kill-after={GRACE}", str(limit), sys.executable]
    command += ["-m", RUNNER, name, str(scratch)]
    since = time.monotonic()
    with (scratch / "log").open("wb") as log:
        done = subprocess.run(
            command, env=environment, cwd=scratch, stdout=log, stderr=subprocess.STDOUT, check=False
        )
    seconds = time.monotonic() - since
    path = scratch / "step.json"
    empty: dict[str, Any] = {"step": name, "checks": [], "figures": {}}
    content = json.loads(path.read_text(encoding="utf-8")) if path.exists() else empty
    checks = content["checks"]
    if done.returncode:
        over = seconds >= limit
        said = f"over {limit} s" if over else f"exit {done.returncode}: see log.txt"
        checks.append({"what": "ends", "expected": "exit 0", "seen": said, "ok": False})
    content |= {"seconds": round(seconds, 1), "exit_code": done.returncode}
    content["ok"] = all(check["ok"] for check in checks) if checks else None
    _keep(name, scratch, folder)
    print(f"{name}: {'ok' if content['ok'] else 'see below'}, {seconds:.0f} s", flush=True)
    return content


def _limit(step: Step, left: float) -> int:
    if os.environ.get("SIMULATED") == "1":
        return SLOWER * step.seconds
    return max(1, int(min(2 * step.seconds, left - GRACE)))


def _keep(name: str, scratch: Path, folder: Path) -> None:
    """Add the end of a step's log, and its profiles, to those of all; remove what it wrote."""
    for own, every in (("log", "log.txt"), ("profiles.txt", "profiles.txt")):
        if (scratch / own).exists():
            text = (scratch / own).read_bytes()[-MOST_LOG:]
            with (folder / every).open("ab") as file:
                file.write(f"==== {name}\n".encode() + text + b"\n")
    shutil.rmtree(scratch, ignore_errors=True)


def table(results: Sequence[dict[str, Any]]) -> str:
    """Return a line for each check: step, what, expected, seen, ok."""
    rows = [("step", "what", "expected", "seen", "ok")]
    for result in results:
        name = result["step"]
        if "left_out" in result:
            rows.append((name, "", "", f"left out: {result['left_out']}", "-"))
        elif not result["checks"]:
            rows.append((name, "", "", "nothing to check here", "-"))
        for check in result["checks"]:
            ok = "yes" if check["ok"] else "NO"
            rows.append((name, check["what"], check["expected"], check["seen"][:60], ok))
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=True)]
        lines.append("  ".join(cells).rstrip())
    cards = [result["machine"] for result in results if "machine" in result]
    if cards:
        lines.append(", ".join(f"{name} {value}" for name, value in cards[0].items() if value))
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
