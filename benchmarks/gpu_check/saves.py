"""Memory: what a save costs in time and pinned memory, and how large a batch fits."""

import statistics
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

from benchmarks import runs
from benchmarks.gpu_check.checks import DEVICE, ON_CUDA, SIMULATED, Checks
from benchmarks.gpu_check.ours import SMALL, built, equal
from benchmarks.report import BY_HAND, OURS
from regimen.conf.check import parse
from regimen.scripts.composition.compose import compose
from regimen.trainer.assembly.accumulation import find_accumulation_steps
from regimen.trainer.assembly.experiment import build
from regimen.trainer.checkpoints.reader import read_checkpoint
from regimen.trainer.strategies.strategy import Strategy

INTERVAL = 4 if SIMULATED else 20  # updates between two saves
ROUNDS = 1 if SIMULATED else 4
MOST_TIME = 0.15  # of a save by hand
MOST_PINNED = 2.0  # times the file
BATCH, SIDE = (64, 16) if SIMULATED else (4096, 224)
UPDATES = 2 if SIMULATED else 20
FEW = 16 if SIMULATED else 512  # samples of the validation set


def saves(checks: Checks) -> None:
    """Save ResNet-50 and AdamW in turn by the callback and by hand; then go on from a save."""
    with checks.part("time and pinned memory"):
        if SIMULATED:
            runs.network = _tiny  # type: ignore[assignment]
        before = _pinned()
        found = runs.save_in_turn("AdamW", ROUNDS, INTERVAL)
        own = {name: statistics.median(times[1:]) for name, times in found.blocked.items()}
        checks.figure("milliseconds of a save", own)
        ratio = own[OURS] / own[BY_HAND]
        most = f"<= {MOST_TIME} of by hand"
        checks.add("a save keeps waiting", most, f"{ratio:.3f}", ratio <= MOST_TIME or SIMULATED)
        size = found.file_size
        pinned = _pinned() - before
        checks.figure("bytes of the file, and pinned", [size, pinned])
        seen = f"{pinned / size:.2f}" if ON_CUDA else "not told by this device"
        few = pinned <= MOST_PINNED * size
        checks.add("host memory pinned, by the file", f"<= {MOST_PINNED}", seen, few)
    with checks.part("a resume"):
        _resumed(checks)


def _tiny() -> torch.nn.Module:
    pool = [torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten()]
    return torch.nn.Sequential(*pool, torch.nn.Linear(3, 10))


def _pinned() -> int:
    """Return the bytes of host memory that torch has pinned, those that it keeps included."""
    if not ON_CUDA:
        return 0
    return int(torch.cuda.host_memory_stats().get("allocated_bytes.current", 0))


def _resumed(checks: Checks) -> None:
    """Train with two saves; go on from the first, and compare the second."""
    model = SMALL if SIMULATED else ["model=resnet50"]
    words = ["experiment=resnet18", *model, "optimizer=adamw", "loader.num_workers=0"]
    words += ["trainer.deterministic=true", "trainer.limit_val_batches=0"]
    words += ["callbacks=[checkpoint]", "callbacks.checkpoint.save_top_k=-1"]
    words += [f"callbacks.checkpoint.every_n_steps={INTERVAL}", f"trainer.max_steps={2 * INTERVAL}"]
    folder = checks.folder / "saved"
    built(words, DEVICE, run_dir=folder / "whole").trainer.fit()
    first, second = (f"step-{n * INTERVAL:08d}.pt" for n in (1, 2))
    trainer = built(words, DEVICE, run_dir=folder / "resumed").trainer
    trainer.fit(resume=folder / "whole" / "checkpoints" / first)
    files = [folder / name / "checkpoints" / second for name in ("whole", "resumed")]
    states = [_tensors(path) for path in files]
    same = equal(*states)
    checks.figure("tensors compared", len(states[0]))
    said = "bit-equal" if same else "not equal"
    checks.add("the file after a resume", "bit-equal", said, same)


def _tensors(path: Path) -> dict[str, Tensor]:
    """Return all tensors of a checkpoint's model and optimizer, by their place."""
    payload = read_checkpoint(path)
    found: dict[str, Tensor] = {}

    def walk(value: Any, place: str) -> None:
        if isinstance(value, Tensor):
            found[place] = value
        elif isinstance(value, dict):
            for name, inner in value.items():
                walk(inner, f"{place}.{name}")

    walk(payload["model"], "model")
    walk(payload["optimizer"], "optimizer")
    return found


class Pictures(Dataset[tuple[Tensor, int]]):
    """Made-up pictures of a few kinds, as many as a large batch asks for."""

    def __init__(self, samples: int, side: int, transform: Any = None) -> None:
        draws = torch.Generator().manual_seed(0)
        self._kinds = torch.randint(256, (10, 3, side, side), generator=draws, dtype=torch.uint8)
        self._samples = samples
        self.transform = transform
        self.classes = [str(number) for number in range(10)]

    def __len__(self) -> int:
        return self._samples

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        kind = index % 10
        image = self._kinds[kind]
        return (image if self.transform is None else self.transform(image)), kind


PICTURES = """
defaults:
  - _self_
  - override /transforms@_global_.transforms: on_device
num_classes: 10
image_size: {side}
channels: 3
mean: [0.5, 0.5, 0.5]
std: [0.25, 0.25, 0.25]
train: {{_target_: benchmarks.gpu_check.saves.Pictures, samples: {samples}, side: {side}}}
val: {{_target_: benchmarks.gpu_check.saves.Pictures, samples: {few}, side: {side}}}
test: null
"""


def memory(checks: Checks) -> None:
    """Find how many micro-batches fit, then train with an average and a plain optimizer."""
    place = checks.folder / "conf" / "data" / "pictures.yaml"
    place.parent.mkdir(parents=True)
    place.write_text(PICTURES.format(side=SIDE, samples=BATCH * UPDATES, few=FEW), encoding="utf-8")
    words = ["--config-dir", str(checks.folder / "conf"), "--allow-target", "benchmarks"]
    words += ["experiment=resnet18"]
    words += [*(SMALL if SIMULATED else []), "data=pictures", "callbacks=[ema]"]
    words += ["optimizer=adamw"]
    words += ["+optimizer.foreach=false", "+optimizer.fused=false", "trainer.precision=bf16"]
    words += [f"loader.batch_size={BATCH}", f"trainer.max_steps={UPDATES}"]
    words += ["loader.num_workers=0" if SIMULATED else "loader.num_workers=4"]
    words += [f"loader.eval_batch_size={FEW}"]
    words += ["trainer.gradient_accumulation_steps=auto", "trainer.channels_last=true"]
    config = parse(compose(words).config)
    strategy = Strategy(DEVICE)
    strategy.setup()
    if SIMULATED:
        torch.get_device_module(DEVICE).set_memory_limit(0, 2**20)
    steps = find_accumulation_steps(config, strategy)
    checks.figure("gradient_accumulation_steps", steps)
    options = replace(config.trainer, gradient_accumulation_steps=steps)
    torch.accelerator.reset_peak_memory_stats()
    trainer = build(replace(config, trainer=options), strategy).trainer
    trainer.fit()
    peak = torch.accelerator.max_memory_allocated()
    checks.figure("peak of tensors, MiB", round(peak / 2**20))
    seen = f"{trainer.state.updates} updates, {steps} micro-batches"
    what = f"batch {BATCH}, EMA, plain AdamW"
    checks.add(what, "no out-of-memory", seen, trainer.state.updates == UPDATES)
