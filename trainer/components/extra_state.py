"""State of a run that no state dict of the model holds: what is saved beside it, what is lost."""

import logging
from collections.abc import Container, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from regimen.data.batch import map_tensors
from regimen.trainer.errors import UserCodeError, describe_value, qualified_name
from regimen.trainer.task import Task, check_persistent, tensors_of

_log = logging.getLogger(__name__)


class ExtraState:
    """Save state that the model's state dict lacks, and name what cannot be saved.

    Saved are the state of the task's own modules (the weights of a loss, moving centres), the
    task's `persistent` attributes, and buffers with `persistent=False` that differ from their
    initial value: constants, such as masks, are not saved. Other attributes (numbers, tensors) are
    not saved; those that change are named once in the log.

    `device`: where the task's tensors are. Raises ModelError for an attribute that does not exist.
    """

    def __init__(self, model: nn.Module, task: Task, device: torch.device) -> None:
        check_persistent(task)
        self._task = task
        self._device = device
        self._task_modules: dict[str, nn.Module] = {}  # by the prefix of their names
        for name, module in task.own_modules().items():
            self._task_modules[f"task.{name}."] = module
        self.modules = {"": model, **self._task_modules}  # whose states a checkpoint holds
        self._initial: dict[str, Tensor] = {}
        for name, _, _, value in self._nonpersistent_buffers():
            self._initial[name] = value.detach().cpu().clone()
        self._fingerprints = dict(self._attributes())
        self._named_in_log: set[str] = set()

    def state_dict(self, left_out: Container[str] = ()) -> dict[str, dict[str, Any]]:
        """Return this process's state, whose tensors are not copied; warn of changed attributes.

        left_out: names of the task's parameters that are not returned.

        Raises UserCodeError for a persistent attribute that a checkpoint cannot hold.
        """
        self._warn_of_changed_attributes()
        buffers: dict[str, Tensor] = {}
        for name, _, _, value in self._nonpersistent_buffers():
            initial = self._initial.get(name)
            # Waits for the device.
            if initial is None or not torch.equal(value.cpu(), initial):
                buffers[name] = value
        state = self._task_state()
        task = {name: value for name, value in state.items() if name not in left_out}
        attributes = self._task.state_dict()
        for name, value in attributes.items():
            if not _is_plain(value):
                raise UserCodeError(
                    f"{qualified_name(self._task)}.persistent names {name!r}, which is "
                    f"{describe_value(value)}: a checkpoint holds tensors, numbers, texts, None, "
                    "and lists, tuples and dicts of these"
                )
        return {"buffers": buffers, "task": task, "attributes": attributes}

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Mapping[str, Any]]) -> list[str]:
        """Load what `state_dict` returned; return a message for each entry that does not fit."""
        buffers = list(self._nonpersistent_buffers())
        for name, module, attribute, present in buffers:
            value = state["buffers"].get(name, self._initial.get(name, present))
            if present.shape == value.shape:
                present.copy_(value)
            else:
                setattr(module, attribute, value.to(present))
        known = {name for name, *_ in buffers}
        misfits = [name for name in state["buffers"] if name not in known]

        task = self._task_state()
        for name, value in state["task"].items():
            if name in task and task[name].shape == value.shape:
                task[name].copy_(value)
            else:
                misfits.append(name)

        attributes = {}
        for name, value in state.get("attributes", {}).items():
            if hasattr(self._task, name):
                attributes[name] = map_tensors(lambda t: t.to(self._device, copy=True), value)
            else:
                misfits.append(f"task.{name}")
        self._task.load_state_dict(attributes)
        return [f"the checkpoint's {name} is not in this run" for name in misfits]

    def _warn_of_changed_attributes(self) -> None:
        before = self._fingerprints
        self._fingerprints = dict(self._attributes())
        for name in sorted(self._fingerprints):
            # A new attribute is taken for a cache until it changes.
            is_changed = name in before and before[name] != self._fingerprints[name]
            if is_changed and name not in self._named_in_log:
                self._named_in_log.add(name)
                _log.warning("%s", _unsaved_remark(name))

    def _task_state(self) -> dict[str, Tensor]:
        state: dict[str, Tensor] = {}
        for prefix, module in self._task_modules.items():
            for name, value in module.state_dict(keep_vars=True).items():
                if isinstance(value, Tensor):
                    state[prefix + name] = value
        return state

    def _nonpersistent_buffers(self) -> Iterator[tuple[str, nn.Module, str, Tensor]]:
        """Yield each buffer that a state dict lacks: its name, its module, its name in that, it."""
        for prefix, root in self.modules.items():
            persistent = root.state_dict()
            for path, value in root.named_buffers():
                if path not in persistent:
                    owner, _, name = path.rpartition(".")
                    yield prefix + path, root.get_submodule(owner), name, value

    def _attributes(self) -> Iterator[tuple[str, Any]]:
        """Yield a fingerprint of each number and tensor: another one when the attribute changes."""
        for root_prefix, root in self.modules.items():
            for path, module in root.named_modules():
                prefix = f"{root_prefix}{path}." if path else root_prefix
                for name, value in vars(module).items():
                    if isinstance(value, Tensor):
                        yield prefix + name, (id(value), value._version)
                    elif isinstance(value, int | float | complex) and name != "training":
                        yield prefix + name, repr(value)  # as a text NaN equals itself
        for name, value in vars(self._task).items():
            if name in self._task.persistent:
                continue
            tensors = [(id(tensor), tensor._version) for tensor in tensors_of(value)]
            if tensors:
                yield f"task.{name}", tensors
            elif isinstance(value, int | float | complex):
                yield f"task.{name}", repr(value)


def _unsaved_remark(name: str) -> str:
    lost = "checkpoints lack it, and a resume starts from its initial value"
    attribute = name.removeprefix("task.")
    if name.startswith("task.") and "." not in attribute:
        return (
            f"{name} changes in training but is not among the task's persistent attributes: "
            f'{lost}; persistent = ("{attribute}",) saves it, and evaluations leave it as it was'
        )
    return f"{name} changes in training but is not a buffer: {lost}; use register_buffer to save it"


def _is_plain(value: Any) -> bool:
    """Return whether a checkpoint can hold a value, and be read without running code."""
    if isinstance(value, Mapping):
        return all(isinstance(name, str | int) and _is_plain(v) for name, v in value.items())
    if isinstance(value, list | tuple):
        return not hasattr(value, "_fields") and all(_is_plain(v) for v in value)
    return value is None or isinstance(value, Tensor | bool | int | float | str)
