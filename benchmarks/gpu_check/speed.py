"""How fast: loops by hand in turns, kernels, JPEG files and kept data, the recipe of airbench."""

import itertools
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch.nn.functional import cross_entropy
from torch.nn.utils import clip_grad_norm_
from torch.profiler import ProfilerActivity, profile

from benchmarks import gpu
from benchmarks.data import made_up, ours_of_files
from benchmarks.gpu_check.checks import DEVICE, ON_CUDA, SIMULATED, Checks
from benchmarks.ours import AfterUpdate, train
from benchmarks.report import BY_HAND, OURS, paired
from regimen.models.gpt import GPT
from regimen.trainer.device import empty_caches, has_streams
from regimen.trainer.strategies.strategy import Strategy
from regimen.trainer.tasks.classification import Classification
from regimen.trainer.tasks.language_model import LanguageModel
from regimen.trainer.trainer import Trainer

RIG = gpu.Rig(DEVICE, None, None, SIMULATED, None if SIMULATED else "default", seconds=1.0)
if SIMULATED:
    RIG = replace(RIG, updates=2)
TURNS = 1 if SIMULATED else 7  # short ones in turn: a machine that varies changes few pairs
MOST_KERNELS = 12  # an update, beyond the loop by hand
LEAST = 0.98
# GPT-2's smallest: 124 million parameters. Sequences and tokens of an update fit 16 GiB.
VOCABULARY, CONTEXT, DIM, DEPTH, HEADS, SEQUENCES = 50304, 1024, 768, 12, 12, 8
if SIMULATED:
    VOCABULARY, CONTEXT, DIM, DEPTH, HEADS, SEQUENCES = 64, 16, 16, 1, 2, 2
WORKERS = 2 if SIMULATED else min(16, os.cpu_count() or 1)
FILES = 8 if SIMULATED else 96  # different JPEG files, each linked many times
SKIPPED = 2 if SIMULATED else 2 * WORKERS + 8  # updates: what is decoded ahead is used up by then
TIMED = 4 if SIMULATED else 40


def speed(checks: Checks) -> None:
    """Compare with loops by hand, in turns; ResNet-18 first: its numbers come in seconds."""
    for name in ("resnet18", "resnet50"):
        with checks.part(name):
            ways = gpu.contenders(RIG, name)
            _compare(checks, name, ways, RIG.network(name)[4], "images/s")
            # What is launched beyond by hand does not grow with the network: one tells.
            if name == "resnet18":
                with checks.part(f"{name}, kernels"):
                    _kernels(checks, name, ways)
        torch.compiler.reset()
    with checks.part("GPT"):
        ways = {BY_HAND: _gpt_by_hand(), OURS: _gpt()}
        _compare(checks, "GPT of 124 M", ways, SEQUENCES * CONTEXT, "tokens/s")


def _compare(
    checks: Checks, name: str, ways: dict[str, gpu.Contender], count: int, unit: str
) -> None:
    rates = gpu.rates(RIG, ways, count, TURNS)
    for who, own in rates.items():
        checks.figure(f"{name}, {who}, {unit}", [round(rate, 1) for rate in own])
    ratio = paired(rates[OURS], rates[BY_HAND])
    enough = ratio >= LEAST or SIMULATED
    checks.add(f"{name}, by the loop by hand", f">= {LEAST}", f"{ratio:.3f}", enough)


def _kernels(checks: Checks, name: str, ways: dict[str, gpu.Contender]) -> None:
    counts = {who: gpu.kernels(RIG, run) for who, run in ways.items()}
    checks.figure(f"{name}, kernels an update", counts)
    more = counts[OURS] - counts[BY_HAND]
    few = more <= MOST_KERNELS or SIMULATED  # which counts operators, not kernels
    checks.add(f"{name}, kernels beyond by hand", f"<= {MOST_KERNELS}", f"{more:g}", few)
    if ON_CUDA:
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as trace:
            ways[OURS](5)
        checks.table(f"speed: {name}, 5 updates", trace)


def _language_model() -> tuple[Any, torch.optim.Optimizer, Any]:
    torch.manual_seed(0)
    model = GPT(VOCABULARY, CONTEXT, DIM, DEPTH, HEADS).to(DEVICE)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-4, fused=has_streams(DEVICE))
    tokens = torch.randint(VOCABULARY, (SEQUENCES, CONTEXT + 1), device=DEVICE)
    return model, optimizer, (tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())


def _gpt_by_hand() -> gpu.Contender:
    """Return a loop with the clipping, the accuracy and the sums that ours has; not compiled."""
    model, optimizer, (tokens, following) = _language_model()

    def run(updates: int) -> None:
        sums = torch.zeros(3, device=DEVICE)
        for _ in range(updates):
            with torch.autocast(DEVICE.type, torch.bfloat16):
                logits = model(tokens)
                loss = cross_entropy(logits.flatten(0, 1), following.flatten())
            loss.backward()  # type: ignore[no-untyped-call]
            norm = clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            right = logits.detach().argmax(-1).eq(following).sum()
            sums += torch.stack([loss.detach(), norm, right])
        sums.tolist()

    return run


def _gpt() -> gpu.Contender:
    model, optimizer, batch = _language_model()
    options = {"log_every_n_steps": 10**9, "clip_grad_norm": 1.0}
    others: dict[str, Any] = {"task": LanguageModel(VOCABULARY), "callbacks": {}}
    others |= {"strategy": Strategy(DEVICE), "precision": "bf16"}

    def run(updates: int) -> None:
        batches = [batch] * updates
        train(model, optimizer, batches, {**options, "max_steps": updates}, **others)

    return run


def data(checks: Checks) -> None:
    """Feed ResNet-50 from JPEG files, and ResNet-18 from images that are kept on the device."""
    with checks.part("JPEG files"):
        _from_files(checks)
    torch.compiler.reset()
    empty_caches()
    with checks.part("data.cache=device"):
        _kept(checks)


def _from_files(checks: Checks) -> None:
    batch = RIG.network("resnet50")[4]
    updates = SKIPPED + TIMED
    tree = _pictures(checks.folder / "jpeg", 500, batch * updates)
    words = ["transforms=imagenet", f"loader.batch_size={batch}", "loader.drop_last=true"]
    words += [f"loader.num_workers={WORKERS}", "loader.persistent_workers=false"]
    loader = ours_of_files(tree, *words, device=DEVICE)
    alone = _rate("resnet50", _batches("resnet50", updates), batch)
    fed = _rate("resnet50", loader, batch)
    decoded = _decoded(ours_of_files(tree, *words, device=DEVICE), batch)
    checks.figure("JPEG files, images/s", {"fed": fed, "alone": alone, "decoders": decoded})
    waits = 1 - fed / alone
    # The device may wait if the decoders give no more: then more or faster cores are the remedy.
    # Alone they have all cores; while a network trains, its process takes one of them.
    at_their_limit = fed >= 0.9 * decoded * (WORKERS - 1) / WORKERS
    seen = f"waits {waits:.1%}; {WORKERS} decoders "
    seen += "at their limit" if at_their_limit else f"could give {decoded / fed:.2f} times as much"
    ok = waits < 0.05 or at_their_limit or SIMULATED
    checks.add("JPEG files: the device", "waits < 5%, or decoders at limit", seen, ok)


def _kept(checks: Checks) -> None:
    batch = RIG.network("resnet18")[4]
    updates = SKIPPED + TIMED
    tree = _pictures(checks.folder / "small", 32, batch * updates)
    words = ["data.image_size=32", "transforms=on_device", "data.cache=device"]
    words += [f"loader.batch_size={batch}", "loader.drop_last=true", "loader.num_workers=0"]
    loader: Any = ours_of_files(tree, *words, device=DEVICE)
    # By CUDA graphs: kernel by kernel the host's launches are the limit of so small a network. Then
    # the device waits anyway, and any launch of the transforms makes the update longer.
    rig = RIG if SIMULATED else replace(RIG, mode="reduce-overhead")
    alone = _rate("resnet18", _batches("resnet18", updates), batch, rig)
    fed = _rate("resnet18", loader, batch, rig)
    kept = loader.kept.ready
    checks.add("data.cache=device: kept there", "yes", "yes" if kept else "no", kept)
    checks.figure("data.cache=device, images/s", {"fed": fed, "alone": alone})
    waits = 1 - fed / alone
    seen = f"{waits:.1%}, its transforms included"
    checks.add("data.cache=device: the device waits", "< 5%", seen, waits < 0.05 or SIMULATED)


def _pictures(folder: Path, side: int, samples: int) -> Path:
    """Make up some JPEG files, and links to them for the rest of an epoch."""
    place = folder / "train" / "pictures"
    place.mkdir(parents=True)
    files = []
    for number, picture in enumerate(made_up(FILES, side, 3)):
        files.append(place / f"{number:06d}.jpg")
        Image.fromarray(picture.permute(1, 2, 0).numpy()).save(files[-1], quality=90)
    for number in range(FILES, samples):
        (place / f"{number:06d}.jpg").symlink_to(files[number % FILES])
    return folder


def _batches(name: str, updates: int) -> list[Any]:
    """Return one batch on the device, so many times."""
    _, _, side, classes, count = RIG.network(name)
    images = torch.randn(count, 3, side, side, device=DEVICE)
    images = images.to(memory_format=torch.channels_last)
    return [(images, torch.randint(classes, (count,), device=DEVICE))] * updates


def _rate(name: str, loader: Any, batch: int, rig: gpu.Rig = RIG) -> float:
    """Return images a second, without the updates that compile and use up what is decoded ahead."""
    model, optimizer, compiled = gpu.network(rig, name)
    stamps = []

    def stamp(trainer: Trainer) -> None:
        # The host waits for the device here, twice in all.
        if trainer.state.updates in (SKIPPED, SKIPPED + TIMED):
            stamps.append(RIG.wait())

    options = {"channels_last": True, "log_every_n_steps": 10**9, "clip_grad_norm": 1.0}
    options |= {"max_steps": SKIPPED + TIMED}
    others: dict[str, Any] = {"task": Classification(RIG.network(name)[3]), "compiled": compiled}
    others |= {"strategy": Strategy(DEVICE), "precision": "bf16"}
    others |= {"callbacks": {"stamp": AfterUpdate(stamp)}}
    train(model, optimizer, loader, options, **others)
    return TIMED * batch / (stamps[1] - stamps[0])


def _decoded(loader: Any, batch: int) -> float:
    """Return images a second of the loader alone."""
    stamps = []
    for update, _ in enumerate(itertools.islice(loader.epoch(0), SKIPPED + TIMED), start=1):
        if update in (SKIPPED, SKIPPED + TIMED):
            stamps.append(RIG.wait())
    loader.close()
    return TIMED * batch / (stamps[1] - stamps[0])


def airbench(checks: Checks) -> None:
    """Train the recipe once to compile, and once by the clock."""
    root = Path(os.environ.get("DATA_ROOT", "datasets")) / "cifar10"
    if not (root / "train").is_dir():
        checks.figure("left out", f"{root} holds no train/<class>/*")
        return
    rig = replace(RIG, root=root.resolve())
    words = gpu.airbench94(rig)
    seconds, share = [gpu.trained(rig, words) for _ in range(2)][1]
    checks.figure("seconds", round(seconds, 2))
    least = 0.0 if SIMULATED else 0.94
    seen = f"{share:.4f} in {seconds:.1f} s"
    checks.add("airbench94, share of the test images", f">= {least}", seen, share >= least)
