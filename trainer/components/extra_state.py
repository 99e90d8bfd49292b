"""State of a run that no state dict of the model holds: what is saved beside it, what is lost."""

import logging
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from regimen.trainer.task import Task

_log = logging.getLogger(__name__)


class _Buffer(NamedTuple):
    # A buffer that the state dict of its module lacks.
    module: nn.Module
    name: str
    value: Tensor


class ExtraState:
    """Save state that the model's state dict lacks, and name what cannot be saved.

    Saved are the state of the task's own modules (the weights of a loss, moving centres), and
    buffers with `persistent=False` that differ from their initial value: constants, such as masks,
    are not saved. Plain attributes (numbers, tensors) are not saved; those that change are named
    once in the log.
    """

    def __init__(self, model: nn.Module, task: Task) -> None:
        self._task_modules = {
            f"task.{name}.": module for name, module in task.own_modules().items()
        }
        self._modules = {"": model, **self._task_modules}
        self._initial = {
            name: _on_host(buffer.value) for name, buffer in self._nonpersistent_buffers()
        }
        self._fingerprints = dict(self._attributes())
        self._named_in_log: set[str] = set()

    def state_dict(self) -> dict[str, dict[str, Tensor]]:
        """Return this process's state on the host; warn about attributes that changed."""
        self._warn_of_changed_attributes()
        buffers: dict[str, Tensor] = {}
        for name, buffer in self._nonpersistent_buffers():
            initial = self._initial.get(name)
            if initial is None or not torch.equal(buffer.value.cpu(), initial):
                buffers[name] = _on_host(buffer.value)
        task = {name: _on_host(value) for name, value in self._task_state().items()}
        return {"buffers": buffers, "task": task}

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Mapping[str, Tensor]]) -> list[str]:
        """Load what `state_dict` returned; return a message for each entry that does not fit."""
        buffers = dict(self._nonpersistent_buffers())
        for name, buffer in buffers.items():
            value = state["buffers"].get(name, self._initial.get(name, buffer.value))
            if buffer.value.shape == value.shape:
                buffer.value.copy_(value)
            else:
                setattr(buffer.module, buffer.name, value.to(buffer.value))
        misfits = [name for name in state["buffers"] if name not in buffers]

        task = self._task_state()
        for name, value in state["task"].items():
            if name in task and task[name].shape == value.shape:
                task[name].copy_(value)
            else:
                misfits.append(name)
        return [f"the checkpoint's {name} is not in this run" for name in misfits]

    def _warn_of_changed_attributes(self) -> None:
        before = self._fingerprints
        self._fingerprints = dict(self._attributes())
        for name in sorted(self._fingerprints):
            # A new attribute is taken for a cache until it changes.
            is_changed = name in before and before[name] != self._fingerprints[name]
            if is_changed and name not in self._named_in_log:
                self._named_in_log.add(name)
                _log.warning(
                    "%s changes in training but is not a buffer: checkpoints lack it, and a resume "
                    "starts from its initial value; use register_buffer to save it",
                    name,
                )

    def _task_state(self) -> dict[str, Tensor]:
        state: dict[str, Tensor] = {}
        for prefix, module in self._task_modules.items():
            for name, value in module.state_dict(keep_vars=True).items():
                if isinstance(value, Tensor):
                    state[prefix + name] = value
        return state

    def _nonpersistent_buffers(self) -> Iterator[tuple[str, _Buffer]]:
        """Yield the buffers that a state dict lacks, by name."""
        for prefix, root in self._modules.items():
            persistent = root.state_dict()
            for path, value in root.named_buffers():
                if path not in persistent:
                    owner, _, name = path.rpartition(".")
                    yield prefix + path, _Buffer(root.get_submodule(owner), name, value)

    def _attributes(self) -> Iterator[tuple[str, Any]]:
        """Yield a fingerprint of each number and tensor: another one when the attribute changes."""
        for root_prefix, root in self._modules.items():
            for path, module in root.named_modules():
                prefix = f"{root_prefix}{path}." if path else root_prefix
                for name, value in vars(module).items():
                    if isinstance(value, Tensor):
                        yield prefix + name, (id(value), value._version)
                    elif isinstance(value, int | float | complex) and name != "training":
                        yield prefix + name, repr(value)  # as a text NaN equals itself


def _on_host(value: Tensor) -> Tensor:
    # Waits for the device: state is read at a checkpoint only.
    return value.detach().cpu().clone()
