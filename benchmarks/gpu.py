"""Training on an accelerator, against the same by hand: `python -m benchmarks gpu`.

- `airbench94` (with `data.root=DIR` of CIFAR-10 as image files): seconds of all its epochs and the
  test, and accuracy, against a loop with its data on the device; `resnet18_cifar10`, whole, once;
- `resnet18` and `resnet50` at 224, bf16, channels_last, compiled, on one batch that stays on the
  device: images a second against a bare loop, and how often the host waits for the device between
  log lines; `kernels` that an update launches;
- `jpeg`: the ResNet-50 from JPEG files of `$DATA_ROOT/imagenet` (or made-up ones), against
  torchvision's `ImageFolder` and a bare loop; `share_of_time` is the share of its time that the
  device does not wait for data: images a second by those of the batch that stays.

`parts=resnet50,jpeg` measures these alone. A turn takes about three seconds; `limit=N` gives the
updates of one instead. Each part is written as soon as it is known, into a file
of its own; one that fails does not end the others. A first, uncounted turn compiles;
`compile=reduce-overhead` compiles both sides in that mode of torch's, with CUDA graphs,
`compile=false` neither. `device=` names another than the first accelerator; `device=cpu limit=2
widths=small` tries all of it without one.
"""

import os
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch.profiler import profile
from torch.utils.data import DataLoader
from torchvision.datasets import ImageFolder

from benchmarks import by_hand, report
from benchmarks.data import IMAGENET, ours_of_files, picture_folder
from benchmarks.ours import train
from benchmarks.report import BY_HAND, OURS, Report
from examples.airbench.by_hand_gpu import train_by_hand
from regimen.conf.check import parse
from regimen.conf.errors import ConfigError
from regimen.data.batch import to_device
from regimen.models.resnet import ResNet
from regimen.scripts.composition.compose import compose
from regimen.trainer.assembly.experiment import Experiment, build
from regimen.trainer.device import device_types, empty_caches, is_async, pins, with_index
from regimen.trainer.strategies.strategy import Strategy
from regimen.trainer.tasks.classification import Classification

NETWORKS = {  # depth, stem, pixels a side, classes, images of an update
    "resnet50": (50, "imagenet", 224, 1000, 256),
    "resnet18": (18, "cifar", 32, 10, 512),
}
FILES, WORKERS = 300, 16  # different JPEG files, each linked many times; at most so many workers
FED = 50  # updates from JPEG files, whose decoding takes longer than what a device does with them
TRIED = 10  # updates that tell how many a turn needs: 50 are over in a second on a fast card
AIRBENCH = str(Path(__file__).parents[1] / "examples" / "airbench" / "conf")
ALONE = "Regimen, a batch that stays"
KNOWN = ("data.root", "device", "limit", "widths", "compile", "parts")

Contender = Callable[[int], object]  # applies so many updates
Values = dict[str, list[float]]  # of each contender
Found = tuple[Values, dict[str, float]]  # and headlines


@dataclass(frozen=True, slots=True)
class Rig:
    """Where the benchmark runs, and how much of it."""

    device: torch.device
    root: Path | None
    updates: int | None  # of a turn; None: as many as take some seconds on this device
    small: bool  # a trial without a GPU
    mode: str | None = "default"  # of torch.compile; None: not compiled
    caches: dict[str, Any] = field(default_factory=dict)  # decoded images by split, read once
    seconds: float = 3.0  # of a turn whose updates are not given

    def network(self, name: str) -> tuple[int, str, int, int, int]:
        """Return depth, stem, pixels a side, classes and images of an update."""
        _, stem, _, classes, _ = NETWORKS[name]
        return (18, stem, 32, classes, 2) if self.small else NETWORKS[name]

    def wait(self) -> float:
        """Return the time when the device has done all that it was given."""
        if is_async(self.device):
            torch.accelerator.synchronize(self.device)
        return time.perf_counter()


def gpu(rounds: int, overrides: Sequence[str] = ()) -> Iterator[tuple[str, Report]]:
    """Run the comparisons, `rounds` turns each, and yield the name and the report of each."""
    rig, names = _asked(dict(word.partition("=")[::2] for word in overrides))
    for name in names:
        try:
            values, headlines = PARTS[name](rig, rounds)
        except Exception:  # such as too little memory: the others go on
            print(f"{name} failed", flush=True)
            traceback.print_exc()
        else:
            title = f"Training on {rig.device}, against the same by hand: {name}"
            settings = {"overrides": list(overrides)}
            yield f"gpu_{name}", Report(title, "value", values, headlines, settings=settings)
        torch.compiler.reset()  # the next part starts afresh
        empty_caches()


def _asked(given: dict[str, str]) -> tuple[Rig, list[str]]:
    names = given["parts"].split(",") if "parts" in given else list(PARTS)
    for kind, words, known in (("key", given, KNOWN), ("part", names, PARTS)):
        for word in words:
            if word not in known:
                raise ConfigError(f"gpu has no {kind} {word!r}: there are {', '.join(known)}")
    device = with_index(given.get("device", device_types()[0]))
    if device.type not in device_types() or ("device" not in given and not is_async(device)):
        there = " and ".join(device_types())
        raise ConfigError(f"the benchmark gpu needs a GPU: torch finds {there} here, and no other")
    root = Path(given["data.root"]).absolute() if "data.root" in given else None
    if "parts" in given and root is None and (of_files := set(names) & set(OF_FILES)):
        raise ConfigError(f"{min(of_files)} needs CIFAR-10 as image files: give data.root=DIR")
    small, mode = given.get("widths") == "small", given.get("compile", "default")
    compiled = None if small or mode == "false" else mode
    rig = Rig(device, root, int(given["limit"]) if "limit" in given else None, small, compiled)
    return rig, [name for name in names if root is not None or name not in OF_FILES]


def contenders(rig: Rig, name: str) -> dict[str, Contender]:
    """Return both loops over one batch on the device, each with a network of its own."""
    _, _, side, classes, count = rig.network(name)
    images = torch.randn(count, 3, side, side, device=rig.device)
    images = images.to(memory_format=torch.channels_last)
    batch = images, torch.randint(classes, (count,), device=rig.device)

    def batches(updates: int) -> list[Any]:
        return [batch] * updates

    return {BY_HAND: bare(rig, name, batches), OURS: ours(rig, name, batches)}


def network(rig: Rig, name: str) -> tuple[Any, torch.optim.Optimizer, Any]:
    """Return a network on the device, its optimizer, and what the compiler makes of it."""
    torch.manual_seed(0)
    depth, stem, _, classes, _ = rig.network(name)
    model: Any = ResNet(depth, classes, stem=stem)  # type: ignore[arg-type]
    model = model.to(rig.device, memory_format=torch.channels_last)
    compiled = torch.compile(model, dynamic=False, mode=rig.mode) if rig.mode else model
    fused = is_async(rig.device)
    return model, torch.optim.SGD(model.parameters(), 0.01, 0.9, fused=fused), compiled


def bare(rig: Rig, name: str, batches: Callable[[int], Iterable[Any]]) -> Contender:
    """Return a loop with the clipping and the running sums that ours has."""
    _, optimizer, compiled = network(rig, name)
    moved = partial(to_device, device=rig.device, channels_last=True)

    def run(updates: int) -> None:
        sums, given = torch.zeros(3, device=rig.device), map(moved, batches(updates))
        done = by_hand.updates(compiled, optimizer, given, clip=True, bf16_on=rig.device.type)
        for loss, outputs, labels, norm in done:
            hits = outputs.detach().argmax(1).eq(labels).sum()
            sums += torch.stack([loss.detach(), norm, hits])
        sums.tolist()

    return run


def ours(rig: Rig, name: str, batches: Callable[[int], Any]) -> Contender:
    """Return the same by a Trainer."""
    model, optimizer, compiled = network(rig, name)
    options = {"channels_last": True, "log_every_n_steps": 10**9, "clip_grad_norm": 1.0}
    others = {"task": Classification(NETWORKS[name][3]), "compiled": compiled, "callbacks": {}}
    others |= {"strategy": Strategy(rig.device), "precision": "bf16"}

    def run(updates: int) -> None:
        train(model, optimizer, batches(updates), {**options, "max_steps": updates}, **others)

    return run


def rates(rig: Rig, ways: dict[str, Contender], batch: int, rounds: int) -> Values:
    """Return images a second of each; the uncounted turn compiles."""
    updates = rig.updates or max(_enough(rig, run) for run in ways.values())

    def rate(run: Contender) -> float:
        since = rig.wait()
        run(updates)
        return updates * batch / (rig.wait() - since)

    turns = {name: partial(rate, run) for name, run in ways.items()}
    # What has told how many updates it needs has compiled.
    return report.in_turn(turns, rounds, uncounted=1 if rig.updates else 0)


def _enough(rig: Rig, run: Contender) -> int:
    """Return how many updates take the seconds of a turn, once compiled."""
    run(TRIED)
    since = rig.wait()
    run(TRIED)
    return max(TRIED, round(rig.seconds * TRIED / (rig.wait() - since)))


def _speed(name: str, rig: Rig, rounds: int) -> Found:
    ways = contenders(rig, name)
    found = rates(rig, ways, rig.network(name)[4], rounds)
    headlines = {"ratio_to_reference": report.paired(found[OURS], found[BY_HAND])}
    if rig.device.type == "cuda":  # torch tells of no other
        headlines["host_waits"] = (_waits(ways[OURS], 6) - _waits(ways[OURS], 2)) / 4
    return _named(f"{name}, images/s", found), headlines


def _waits(run: Contender, updates: int) -> int:
    """Return how often the host waits for the device; what a run does once is in it."""
    torch.cuda.set_sync_debug_mode("warn")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run(updates)
    torch.cuda.set_sync_debug_mode("default")
    # torch also warns, once, that this mode is a prototype: that is no wait.
    return sum("called a synchronizing" in str(warning.message) for warning in caught)


def _kernels(rig: Rig, rounds: int) -> Found:
    """Count separately: a profiler that may not be used here costs no other figure."""
    values, headlines = Values(), {}
    for name in NETWORKS:
        counts = {who: [kernels(rig, run)] for who, run in contenders(rig, name).items()}
        values |= _named(f"{name}, kernels an update", counts)
        headlines[f"{name}_ratio_to_handwritten"] = counts[OURS][0] / counts[BY_HAND][0]
    return values, headlines


def kernels(rig: Rig, run: Contender) -> float:
    """Return how many kernels an update launches; but for CUDA, how many operators it calls.

    What a run does once cancels out between runs of two lengths.
    """
    on_gpu = rig.device.type == "cuda"
    wanted = ("cudaLaunchKernel", "cuLaunchKernel", "cudaGraphLaunch") if on_gpu else ("aten::",)
    counts: list[int] = []
    run(2)  # compiles
    for updates in (2, 6):
        with profile() as trace:
            run(updates)
        counts.append(sum(event.name.startswith(wanted) for event in trace.events()))
    if not counts[0]:
        raise RuntimeError("torch's profiler saw no kernel: it may not be allowed to here")
    return (counts[1] - counts[0]) / 4


def _opened(rig: Rig, words: Sequence[str]) -> Experiment:
    """Build an experiment on CIFAR-10 as image files, all of them for training.

    Images are decoded once for all parts and turns, which compare nothing of it.
    """
    mode = f"{{mode: {rig.mode}}}" if rig.mode else "false"
    words = [*words, "data=cifar10_folder", f"data.root={rig.root}", "data.val_fraction=0"]
    words += ["data.cache=device", "strategy.devices=1", f"trainer.compile={mode}"]
    experiment = build(parse(compose(words).config), Strategy(rig.device))
    for split in ("train", "test"):
        dataset = experiment.data.sets[split]
        dataset.cache = rig.caches.setdefault(split, dataset.cache)
        dataset.fill_cache(lambda: False)
    return experiment


def trained(rig: Rig, words: Sequence[str], by_hand: bool = False) -> tuple[float, float]:
    """Return the seconds of the training and the test, and the share of the test images."""
    experiment = _opened(rig, words)
    trainer, test = experiment.trainer, experiment.test_loaders["test"]
    if by_hand:
        splits = [experiment.data.sets[split].tensors() for split in ("train", "test")]
        parts = [part.to(rig.device) for split in splits for part in split]
        since = rig.wait()
        share = train_by_hand(experiment.config, trainer.model, parts)
    else:
        loaders: list[Any] = [trainer.train_loader, test]
        for loader in loaders:
            loader.kept.fill()
        since = rig.wait()
        trainer.fit()
        share = trainer.evaluate(test, "test")["test/accuracy"]
    return rig.wait() - since, share


def airbench94(rig: Rig) -> list[str]:
    """Return the command line of the recipe."""
    # From wherever this was started: targets of the folder where that is need no leave.
    words = ["--allow-target", "examples", "--config-dir", AIRBENCH]
    words += ["experiment=airbench94", "callbacks=[whitening]"]
    if rig.small:
        words += ["model.widths=[8,16,16]", "loader.batch_size=20", "trainer.max_epochs=2"]
    return words


def _airbench94(rig: Rig, rounds: int) -> Found:
    words = airbench94(rig)
    ways = {BY_HAND: partial(trained, rig, words, True), OURS: partial(trained, rig, words)}
    turns = report.in_turn(ways, rounds)
    seconds, right = ({name: [t[i] for t in own] for name, own in turns.items()} for i in (0, 1))
    values = _named("seconds", seconds) | _named("share of the test images", right)
    return values, {"ratio_to_handwritten": report.paired(seconds[OURS], seconds[BY_HAND])}


def _resnet18_whole(rig: Rig, rounds: int) -> Found:
    words = ["experiment=resnet18_cifar10", "callbacks=none", "trainer.precision=bf16"]
    words += ["model=small_cnn", "trainer.max_epochs=1"] if rig.small else []
    took, share = trained(rig, [*words, "loader.num_workers=0"])
    return {}, {"seconds": took, "accuracy": share}


def _jpeg(rig: Rig, rounds: int) -> Found:
    """Feed both from JPEG files, the images one by one through the recipe for ImageNet."""
    updates = rig.updates or FED
    rig = replace(rig, updates=updates)
    batch = rig.network("resnet50")[4]
    workers = 0 if rig.small else min(WORKERS, os.cpu_count() or 1)
    with tempfile.TemporaryDirectory() as folder:
        tree, _ = picture_folder("imagenet", Path(folder) / "jpeg", 500, 4 if rig.small else FILES)
        place = tree / "train" / "pictures"
        files = sorted(path.resolve() for path in place.iterdir())
        for number in range(len(files), updates * batch):
            (place / f"{number:06d}.jpg").symlink_to(files[number % len(files)])
        options: dict[str, Any] = {"shuffle": True, "drop_last": True, "num_workers": workers}
        options["pin_memory"] = pins(rig.device)
        loader: Any = DataLoader(ImageFolder(f"{tree}/train", IMAGENET), batch, **options)
        words = ["transforms=imagenet", f"loader.batch_size={batch}", "loader.drop_last=true"]
        words += [f"loader.num_workers={workers}", "loader.persistent_workers=false"]
        own = ours_of_files(tree, *words, device=rig.device)
        ways = {
            BY_HAND: bare(rig, "resnet50", partial(islice, loader)),
            OURS: ours(rig, "resnet50", lambda updates: own),
            ALONE: contenders(rig, "resnet50")[OURS],
        }
        found = rates(rig, ways, batch, rounds)
    to = {"ratio_to_reference": BY_HAND, "share_of_time": ALONE}
    ratios = {name: report.paired(found[OURS], found[other]) for name, other in to.items()}
    return _named("resnet50 from JPEG files, images/s", found), ratios


def _named(title: str, values: Values) -> Values:
    return {f"{title}: {name}": own for name, own in values.items()}


PARTS: dict[str, Callable[[Rig, int], Found]] = {n: partial(_speed, n) for n in NETWORKS}
PARTS |= {"kernels": _kernels, "airbench94": _airbench94, "jpeg": _jpeg}
PARTS["resnet18_cifar10"] = _resnet18_whole
OF_FILES = ("airbench94", "resnet18_cifar10")
