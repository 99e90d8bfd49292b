"""Whole runs: the commands and their formats, the tests for any accelerator, exact numbers."""

import importlib.util
import json
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from benchmarks.gpu_check.checks import DEVICE, SIMULATED, Checks
from benchmarks.gpu_check.ours import CPU, SMALL, built, command, distance, equal, run, weights
from regimen import load_run
from regimen.trainer.checkpoints.reader import read_checkpoint
from regimen.trainer.runs.status import read_metrics

ROOT = Path(__file__).resolve().parents[2]
# Of `train experiment=resnet18` on a CPU, less what seeds and formats differ by; 0.1 is chance.
ACCURACY = 0.95
SHORT = [*SMALL, "trainer.max_epochs=1", "loader.batch_size=256", "loader.num_workers=0"]
FORMATS = ("fp32", "tf32", "bf16", "fp16")


def smoke(checks: Checks) -> None:
    """Run the commands as a user would, on the run of the first; then each number format."""
    folder = checks.folder / "run"
    least = 0.05 if SIMULATED else ACCURACY
    words = ["experiment=resnet18", *(SHORT if SIMULATED else [])]
    code = run("train", [*words, f"run_dir={folder}"])
    checks.add("train", "exit 0", f"exit {code}", code == 0)
    if code == 0:
        with checks.part("the run, used"):
            _use(checks, folder, least)
    for name in FORMATS:
        with checks.part(f"train, {name}"):
            given = [*words, f"trainer.precision={name}", "callbacks=none"]
            experiment = built(given, DEVICE)
            experiment.trainer.fit()
            tested = experiment.trainer.evaluate(experiment.test_loaders["test"], "test")
            found = tested["test/accuracy"]
            checks.add(f"accuracy, {name}", f"at least {least}", f"{found:.3f}", found >= least)


def _use(checks: Checks, folder: Path, least: float) -> None:
    """Evaluate, predict and open a finished run; both commands at the same time."""
    found = _accuracy(folder)
    checks.add("accuracy of the run", f"at least {least}", f"{found:.3f}", found >= least)
    table = folder.parent / "answers.csv"
    given = {
        "evaluate": [f"run={folder}"],
        "predict": [f"run={folder}", "source=test", f"out={table}"],
    }
    with ThreadPoolExecutor() as pool:
        codes = pool.map(run, given.keys(), given.values())
        for name, code in zip(given, codes, strict=True):
            checks.add(name, "exit 0", f"exit {code}", code == 0)
    again = json.loads((folder / "evaluation.json").read_text(encoding="utf-8"))
    same = abs(again["test/accuracy"] - found) < 0.005  # a sample or two, of another batch size
    checks.add("evaluate", f"accuracy {found:.3f}", f"{again['test/accuracy']:.3f}", same)
    model = load_run(folder).model()
    with torch.no_grad():
        answers = model(torch.zeros(2, 1, 16, 16, device=DEVICE))
    finite = bool(answers.isfinite().all())
    checks.add("load_run", f"finite answers on {DEVICE}", f"{answers.device}, {finite}", finite)


def _accuracy(folder: Path) -> float:
    lines = read_metrics(folder)
    return float(next(line["test/accuracy"] for line in lines if "test/accuracy" in line))


def tests(checks: Checks) -> None:
    """Run pytest, several files at the same time where a plugin for that is there."""
    if importlib.util.find_spec("pytest") is None:
        checks.add("pytest", "installed", "missing: see the wheels above", False)
        return
    update = ["tests/trainer/update/test_nonfinite.py", "tests/trainer/update/test_turns.py"]
    paths = update[1:] if SIMULATED else ["tests/integration/device", *update]
    words = ["-q", "-ra", "--tb=short", "--import-mode=importlib", "-p", "no:cacheprovider"]
    # Whatever pyproject.toml adds needs plugins that may be missing here.
    words += ["-o", "addopts=", "-k", "not processes", f"--rootdir={ROOT}"]
    if importlib.util.find_spec("xdist") is not None and not SIMULATED:
        words += ["-n", "5", "--dist", "loadfile"]
    words += [str(ROOT / path) for path in paths]
    # In a process of its own: SIGINT from the time limit reaches it, too.
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *words], stdout=subprocess.PIPE, text=True, check=False
    )
    print(done.stdout, flush=True)
    counts = re.findall(r"\d+ (?:passed|failed|errors?|skipped|deselected)", done.stdout)
    checks.add("tests", "all pass", ", ".join(counts) or "no summary", done.returncode == 0)


def numbers(checks: Checks) -> None:
    """Compare with the CPU, with the same again, with another split, and with a killed run."""
    with ThreadPoolExecutor() as pool:
        resumed = pool.submit(_killed_and_resumed, checks.folder)
        _in_process(checks)
        with checks.part("killed by SIGKILL and resumed"):
            same = equal(*resumed.result())
            checks.add("killed by SIGKILL and resumed", "bit-equal", _said(same), same)


def _in_process(checks: Checks) -> None:
    words = ["experiment=resnet18", *SMALL, "callbacks=none", "loader.num_workers=0"]
    words += ["optimizer=sgd", "lr_scheduler=constant", "trainer.max_steps=20"]
    words += ["trainer.deterministic=true", "trainer.limit_val_batches=0"]
    here = {}
    for name, device in (("device", DEVICE), ("again", DEVICE), ("cpu", CPU)):
        with checks.part(f"20 updates, {name}"):
            trainer = built(words, device).trainer
            trainer.fit()
            here[name] = weights(trainer)
    with checks.part("fp32 against the CPU"):
        apart = distance(here["device"], here["cpu"])
        checks.add("fp32 against the CPU, 20 updates", "1e-5", f"{apart:.1e}", apart <= 1e-5)
        same = equal(here["device"], here["again"])
        checks.add("two runs", "bit-equal", _said(same), same)
    with checks.part("micro-batches"):
        states = []
        for steps in (1, 4):
            given = [*words, "model=mlp", f"trainer.gradient_accumulation_steps={steps}"]
            given = [word for word in given if not word.startswith("model.widths")]
            trainer = built(given, DEVICE).trainer
            trainer.fit()
            states.append(weights(trainer))
        apart = distance(states[1], states[0])
        checks.add("1 against 4 micro-batches", "1e-5", f"{apart:.1e}", apart <= 1e-5)
    with checks.part("to the CPU and back"):
        apart = _to_the_cpu_and_back(checks.folder / "moved", words, here["device"])
        checks.add("to the CPU and back", "1e-5", f"{apart:.1e}", apart <= 1e-5)


def _to_the_cpu_and_back(
    folder: Path, words: Sequence[str], whole: dict[str, torch.Tensor]
) -> float:
    """Train 7 updates on the device, 6 on the CPU and 7 on the device; compare with the whole."""
    words = [word for word in words if word != "callbacks=none"]
    words += ["callbacks=[checkpoint]"]
    for last, device in ((7, DEVICE), (13, CPU), (20, DEVICE)):
        trainer = built([*words, f"trainer.max_steps={last}"], device, run_dir=folder).trainer
        trainer.fit(resume="auto")
    return distance(weights(trainer), whole)


def _killed_and_resumed(folder: Path) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Train a run whole, and another that is killed after a save; return the weights of both."""
    words = ["experiment=resnet18", *SMALL, "model.dropout=0.2", "loader.num_workers=0"]
    words += ["trainer.max_epochs=2", "trainer.deterministic=true"]
    words += ["callbacks.checkpoint.every_n_steps=5", "callbacks.checkpoint.save_top_k=-1"]
    killed = [*words, f"run_dir={folder / 'killed'}"]
    with ThreadPoolExecutor() as pool:
        whole = pool.submit(run, "train", [*words, f"run_dir={folder / 'whole'}"])
        _kill_after_a_save(killed, folder / "killed")
        codes = [run("train", [*killed, "resume=auto"]), whole.result()]
    if any(codes):
        raise RuntimeError(f"resumed: exit {codes[0]}, whole: exit {codes[1]}")
    ends = [folder / name / "checkpoints" / "last.pt" for name in ("killed", "whole")]
    resumed, expected = (read_checkpoint(path)["model"] for path in ends)
    return resumed, expected


def _kill_after_a_save(words: Sequence[str], folder: Path) -> None:
    saved = folder / "checkpoints" / "step-00000005.pt"
    with subprocess.Popen(command("train", words)) as process:
        while not saved.exists() and process.poll() is None:
            time.sleep(0.002)
        process.send_signal(signal.SIGKILL)
    if process.returncode != -signal.SIGKILL:
        raise RuntimeError(f"the run ended with {process.returncode} before it could be killed")


def _said(same: bool) -> str:
    return "bit-equal" if same else "not equal"
