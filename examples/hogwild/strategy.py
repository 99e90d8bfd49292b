"""Hogwild (Recht et al., 2011): processes train the same weights, and no one waits for another."""

import os
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from regimen.conf.errors import Problem
from regimen.trainer.checkpoints.archive import on_host
from regimen.trainer.distributed import Group
from regimen.trainer.errors import ModelError
from regimen.trainer.state import TrainState
from regimen.trainer.strategies.multi_process import MultiProcess


class SeldomAgreeing(Group):
    """Processes that ask each other whether to stop at every n-th update only.

    Other groups ask after every update, so that no process is ever two updates ahead.
    """

    def __init__(self, timeout: float, agree_every: int) -> None:
        super().__init__("gloo", timeout)
        self._agree_every = agree_every
        self._calls = 0

    def agree_on_stop(self, state: TrainState, at_once: bool = True) -> None:
        """Stop all processes if any of them requests it; a collective, of every n-th call."""
        self._calls += 1
        if at_once or self._calls % self._agree_every == 0:
            super().agree_on_stop(state, at_once=True)

    def meet(self) -> None:
        """Wait until all processes are here; a collective."""
        self.gather(None)


class Hogwild(MultiProcess):
    """Let each process apply the gradients of its part of every batch to weights that all share.

    The optimizer's state is each process's own. The processes meet where the run logs, validates
    and saves, and every `agree_every` updates, where they may stop: weights that are evaluated or
    saved stand still. On CPUs of one machine.
    """

    name = "hogwild"
    affects_result = True
    shares_parameters = True
    group: SeldomAgreeing

    def __init__(
        self,
        *,
        accelerator: str = "cpu",
        devices: int = 2,
        timeout: float = 1800.0,
        max_restarts: int = 0,
        agree_every: int = 20,
    ) -> None:
        super().__init__(
            accelerator=accelerator,
            devices=devices,
            backend="gloo",
            timeout=timeout,
            max_restarts=max_restarts,
        )
        self.group = SeldomAgreeing(timeout, agree_every)
        if os.environ.get("LOCAL_WORLD_SIZE") != os.environ.get("WORLD_SIZE"):
            raise ModelError(
                "strategy",
                "hogwild shares the memory of one machine, and these processes run on several",
                "strategy=ddp trains on several machines",
            )

    @classmethod
    def problems(
        cls, *, accelerator: str = "cpu", agree_every: int = 20, **others: Any
    ) -> Iterable[Problem]:
        """Return whether there are processes to start, on CPUs, that meet now and then."""
        yield from super().problems(accelerator="cpu", **others)
        if accelerator != "cpu":
            yield Problem(
                "strategy.accelerator",
                f"hogwild shares memory of the CPU, got {accelerator!r}",
                "leave it at cpu",
            )
        if agree_every < 1:
            yield Problem(
                "strategy.agree_every", f"expected a number of updates >= 1, got {agree_every}"
            )

    def check(self, others: Mapping[str, nn.Module]) -> None:
        """Raise ModelError for a task with weights of its own, which would not be shared."""
        for name, module in others.items():
            if any(parameter.requires_grad for parameter in module.parameters()):
                raise ModelError(f"task.{name}", "has weights, and hogwild shares the model's only")

    def wrap(self, model: nn.Module) -> nn.Module:
        """Move the parameters into memory that all processes share; a collective."""
        name = ""
        if self.group.is_main:
            name = tempfile.mkdtemp(dir="/dev/shm" if Path("/dev/shm").is_dir() else None)
        folder = Path(self.group.broadcast(name))
        files = []
        for number, parameter in enumerate(model.parameters()):
            if parameter.numel():
                files.append(folder / str(number))
                _share(parameter, files[-1], writes=self.group.is_main)
        self.group.meet()
        if self.group.is_main:  # the memory stays for as long as a process uses it
            for file in files:
                file.unlink()
            folder.rmdir()
        return model

    @contextmanager
    def evaluating(self, model: nn.Module) -> Iterator[None]:
        """Evaluate weights that stand still; a collective."""
        self.group.meet()
        with super().evaluating(model):
            yield
        self.group.meet()

    def load_model_state(self, model: nn.Module, state: Mapping[str, Any]) -> None:
        """Load the same state on all processes, before the first of them trains; a collective."""
        super().load_model_state(model, state)
        self.group.meet()

    def gather_tensors(self, tree: Any) -> Any:
        """Return a copy of weights that stand still, on the main process; a collective."""
        self.group.meet()
        copied = on_host(tree, Tensor.clone) if self.group.is_main else tree
        self.group.meet()
        return copied


@torch.no_grad()
def _share(parameter: nn.Parameter, file: Path, writes: bool) -> None:
    """Let a parameter's values be those of a file in memory; all processes have the same values."""
    values = torch.from_file(str(file), shared=True, size=parameter.numel(), dtype=parameter.dtype)
    values = values.as_strided(parameter.shape, parameter.stride())
    if writes:
        values.copy_(parameter)
    parameter.data = values
