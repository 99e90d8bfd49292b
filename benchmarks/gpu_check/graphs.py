"""What the host and CUDA graphs do: losses with and without them, and waits for the device."""

from dataclasses import replace
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.gpu_check.checks import DEVICE, ON_CUDA, SIMULATED, Checks
from benchmarks.gpu_check.ours import SMALL, Losses, built
from regimen.conf.errors import ConfigError
from regimen.trainer.callback import Callback
from regimen.trainer.trainer import Trainer
from regimen.trainer.update.updater import Updater

MODE = "reduce-overhead"
# The simulated device has no kernels that torch could compile.
COMPILED = (
    "trainer.compile={backend: aot_eager}" if SIMULATED else f"trainer.compile={{mode: {MODE}}}"
)
# torch records a graph at the third call or so, and replays it from then on.
GRAPHS = [
    *("experiment=resnet18", *SMALL, "loader.num_workers=0", "loader.batch_size=64"),
    *("optimizer=sgd", "optimizer.lr=0.01", "lr_scheduler=constant", "trainer.max_steps=12"),
    *("trainer.limit_val_batches=0", "trainer.log_every_n_steps=1", "callbacks=none"),
]
CASES = {
    "1 micro-batch": [],
    "activation checkpointing": ["trainer.activation_checkpointing=[features.*]"],
    "pictures": ["callbacks=[default,pictures]", "trainer.limit_val_batches=1"],
}
ACCUMULATED = "trainer.gradient_accumulation_steps=4"
WAITS = ("cudaStreamSynchronize", "cudaEventSynchronize", "cudaDeviceSynchronize")
WINDOWS = ((20, 40), (60, 100)) if not SIMULATED else ((3, 5), (6, 10))  # updates that are watched


def graphs(checks: Checks) -> None:
    """Train each case with CUDA graphs and without, and compare the losses of all updates."""
    for name, words in CASES.items():
        with checks.part(name):
            eager = _losses(checks, [*GRAPHS, *words])
            torch.compiler.reset()
            graphed = _losses(checks, [*GRAPHS, *words, COMPILED])
            apart = _apart(eager, graphed)
            checks.add(name, "1e-5", f"{apart:.1e}", len(eager) > 1 and apart <= 1e-5)
    with checks.part("4 micro-batches"):
        _accumulated(checks)


def _accumulated(checks: Checks) -> None:
    """Configurations refuse several micro-batches with CUDA graphs: see whether torch still errs.

    torch lets the graph's own memory be the gradient, which the next micro-batch overwrites.
    """
    try:
        built([*GRAPHS, ACCUMULATED, f"trainer.compile={{mode: {MODE}}}"], DEVICE)
        checks.add("4 micro-batches, by configuration", "refused", "taken", False)
    except ConfigError as error:
        refused = "gradient_accumulation_steps" in str(error)
        checks.add("4 micro-batches, by configuration", "refused", str(error), refused)
    eager = _losses(checks, [*GRAPHS, ACCUMULATED])
    torch.compiler.reset()
    try:
        apart = _apart(eager, _losses(checks, [*GRAPHS, ACCUMULATED], by_hand=True))
    except RuntimeError as error:
        checks.figure("4 micro-batches, past the refusal", str(error).splitlines()[0])
    else:
        checks.figure("4 micro-batches, past the refusal: losses apart by", apart)


def _losses(checks: Checks, words: list[str], by_hand: bool = False) -> list[float]:
    """Return the loss of each update; `by_hand` compiles past the checks of the configuration."""
    losses = Losses()
    trainer = built(words, DEVICE, {"losses": losses}, checks.folder / "graphs").trainer
    if by_hand and not SIMULATED:
        # A test of what a configuration may not ask for.
        recorded: Any = torch.compile(trainer.model, dynamic=False, mode=MODE)
        components = replace(trainer.components, training_model=recorded)
        vars(trainer)["updater"] = Updater(components, trainer.hooks)
    trainer.fit()
    return losses.values


def _apart(ours: list[float], others: list[float]) -> float:
    """Return the largest relative difference of two lists of losses."""
    pairs = zip(ours, others, strict=True)
    return max(abs(one - other) / max(abs(one), 1e-12) for one, other in pairs)


class Watch(Callback):
    """Profile the updates of a window."""

    def __init__(self, first: int, last: int) -> None:
        self._first = first
        self._last = last
        self._watching: Any = None
        self.seen: Any = None  # a profile, or on the simulated device what it counted

    def on_update_end(self, trainer: Trainer) -> None:
        """Begin and end."""
        if trainer.state.updates == self._first:
            self._watching = _watching()
            self.seen = self._watching.__enter__()
        elif trainer.state.updates == self._last:
            self._watching.__exit__(None, None, None)


def _watching() -> Any:
    if ON_CUDA:
        return profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA])
    device: Any = torch.get_device_module(DEVICE)
    return device.waits()


def waits(checks: Checks) -> None:
    """Count what the host waits for within two windows between the log lines of one run.

    A profiler waits when it starts and ends: that cancels out between windows of two lengths.
    """
    watches = {f"watch_{first}": Watch(first, last) for first, last in WINDOWS}
    network = SMALL if SIMULATED else ["trainer.channels_last=true"]
    words = ["experiment=resnet18", *network, "callbacks=none", "loader.batch_size=4"]
    words += [f"trainer.max_steps={WINDOWS[-1][1] + 40}", "trainer.log_every_n_steps=10000"]
    words += ["trainer.limit_val_batches=0", "loader.num_workers=2"]
    experiment = built(words, DEVICE, watches)
    experiment.trainer.fit()
    lengths = [last - first for first, last in WINDOWS]
    counted = [_counts(watch.seen) for watch in watches.values()]
    checks.figure("waits of the windows", [lengths, counted])
    for name in counted[0]:
        each = (counted[1][name] - counted[0][name]) / (lengths[1] - lengths[0])
        checks.add(f"{name}, an update", "0", f"{each:g}", each == 0)
    if ON_CUDA:
        last = list(watches)[-1]
        launched = sum(counts > 0 for counts in _launches(watches[last].seen).values())
        checks.add("the profiler sees launches", "some", launched, launched > 0)
        checks.table("waits: ResNet-18, 40 updates", watches[last].seen)


def _counts(seen: Any) -> dict[str, int]:
    if not ON_CUDA:
        return {"waits": sum(seen.values())}
    names = [event.name for event in seen.events()]
    return {name: names.count(name) for name in WAITS}


def _launches(seen: Any) -> dict[str, int]:
    """Return how often each call is seen that starts kernels: without any, waits tell nothing."""
    names = [event.name for event in seen.events()]
    return {name: names.count(name) for name in ("cudaLaunchKernel", "cudaLaunchKernelExC")}
