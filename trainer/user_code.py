"""Errors in the user's own code: which function failed, what it was given, what to change.

Everything is read from the traceback of an error that is on its way: a run that goes well pays
nothing. Imports no torch.
"""

from __future__ import annotations

import re
import sysconfig
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

from trainer.shadow import PACKAGES, ROOT

_INSTALLED = ("site-packages", "dist-packages")
_NOTEBOOK = ("<ipython", "<stdin>")
# Our functions that hold the batch that the user's code was called for.
_HOLDS_BATCH = ("trainer.update", "trainer.evaluation", "trainer.inference")
_NEAR = 100  # frames that are searched for the layer that failed
# What an error says, and the smallest change that helps. `{}` takes the groups.
_CHANGES = (
    (
        r"mat1 and mat2 shapes cannot be multiplied \(\d+x(\d+) and (\d+)x\d+\)",
        "the layer expects {1} features and got {0}: build it with in_features={0}",
    ),
    (
        r"to have (\d+) channels, but got (\d+) channels",
        "the layer expects {0} channels and got {1}: build it with in_channels={1}",
    ),
    (
        r"Target (-?\d+) is out of bounds",
        "the labels must lie between 0 and the number of outputs less one: give the model an "
        "output for label {0} (model.num_classes), or number the labels from 0",
    ),
    (
        r"values to unpack",
        "write as many names as there are parts",
    ),
    (
        r"missing \d+ required (?:positional|keyword-only) argument|positional arguments? but|"
        r"unexpected keyword argument",
        "let its parameters agree with the call, or give the further ones defaults",
    ),
    (
        r"same dtype|expected scalar type|to be the same|must have the same dtype",
        "convert one of them, with .float() or .long()",
    ),
    (
        r"does not require grad",
        "the loss must be computed from the model's output without .detach(), .item(), numpy or "
        "torch.no_grad()",
    ),
    (
        r"[Tt]he size of tensor a \((\d+)\) must match the size of tensor b \((\d+)\)",
        "bring both to one shape, with .squeeze(), .view() or .flatten(1)",
    ),
    (
        r"indices must be integers|'(?:tuple|list)' object has no attribute",
        "take the parts of the batch as its data set returns them",
    ),
    (
        r"No module named '([\w.]+)'",
        "install {0}, or correct the import",
    ),
)


def spelled(value: Any) -> str:
    """Spell a value's structure briefly: types, and shapes of tensors and arrays."""
    if hasattr(value, "dtype") and hasattr(value, "shape"):
        return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key}: {spelled(v)}" for key, v in [*value.items()][:8]) + "}"
    if isinstance(value, (list, tuple)):
        kind = "(" + ", ".join(spelled(child) for child in value[:4])
        return kind + (", ...)" if len(value) > 4 else ")")
    if value is None or isinstance(value, bool | int | float):
        return str(value)
    return type(value).__name__


def change_for(message: str) -> str | None:
    """Return the smallest change that helps against an error of torch or Python, if it is known."""
    for pattern, change in _CHANGES:
        if found := re.search(pattern, message):
            return change.format(*found.groups())
    return None


def account(error: BaseException) -> str | None:
    """Say on one line where the user's code failed, with what; None where it did not."""
    if hasattr(error, "exit_code") or not isinstance(error, Exception | SystemExit):
        return None
    reason = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}".rstrip(": ")
    if isinstance(error, SyntaxError) and error.filename and is_users(error.filename):
        return f"{error.filename}, line {error.lineno}, is not Python: {error.msg}{_asked(error)}"
    frames = [*_frames(error.__traceback__)]
    last = next((i for i in reversed(range(len(frames))) if is_users(_file(frames[i][0]))), None)
    if last is None:
        return None
    frame, line = frames[last]
    parts = [f"{_called(frame)} ({_file(frame)}, line {line}){_with(frame)}: {reason}"]
    if failed := layer(frame, [inner for inner, _ in frames[last + 1 :]]):
        parts.append(failed)
    if (given := _batch(frames[:last])) is not None and spelled(given) not in parts[0]:
        parts.append(f"the batch is {spelled(given)}")
    if change := change_for(str(error)):
        parts.append(change)
    return "; ".join(parts) + _asked(error)


def layer(frame: FrameType, inner: list[FrameType]) -> str | None:
    """Name the innermost layer of a module's frame that was at work within it, and its input."""
    module = _self(frame)
    if not hasattr(module, "named_modules"):
        return None
    names = {id(child): name for name, child in module.named_modules() if name}
    for other in reversed(inner[:_NEAR]):
        if other.f_code.co_name == "forward" and (name := names.get(id(_self(other)))):
            given = ", ".join(f"{spelled(value)}" for _, value in _arguments(other))
            return f"self.{name}, {_brief(_self(other))}, was given {given}"
    return None


def failed_layer(error: BaseException) -> str | None:
    """Name the layer in which an error arose, where no code of the user's was at work."""
    frames = [frame for frame, _ in _frames(error.__traceback__)]
    for number, frame in enumerate(frames):
        if hasattr(_self(frame), "named_modules") and (found := layer(frame, frames[number:])):
            return found.removeprefix("self.")
    return None


def is_users(file: str) -> bool:
    """Return whether a file of code is the user's: neither ours, nor installed, nor Python's."""
    if file.startswith("<"):
        return file.startswith(_NOTEBOOK)
    path = Path(file)
    if any(part in path.parts for part in _INSTALLED) or path.is_relative_to(_standard_library()):
        return False
    return not (path.is_relative_to(ROOT) and path.relative_to(ROOT).parts[0] in PACKAGES)


def called(thing: Any) -> str:
    """Return the dotted name of an object's class; a wrapper of torch's stands for its model."""
    while type(thing).__module__.startswith(("torch._dynamo", "torch.nn.parallel")):
        thing = thing._orig_mod if hasattr(thing, "_orig_mod") else thing.module
    return f"{type(thing).__module__}.{type(thing).__qualname__}"


def _standard_library() -> str:
    return sysconfig.get_path("stdlib")


def _frames(traceback: TracebackType | None) -> Iterator[tuple[FrameType, int]]:
    while traceback is not None:
        yield traceback.tb_frame, traceback.tb_lineno
        traceback = traceback.tb_next


def _file(frame: FrameType) -> str:
    return frame.f_code.co_filename


def _called(frame: FrameType) -> str:
    module, name = frame.f_globals.get("__name__", "?"), frame.f_code.co_qualname
    return f"module {module}" if name == "<module>" else f"{module}.{name}"


def _self(frame: FrameType) -> Any:
    code = frame.f_code
    return frame.f_locals.get(code.co_varnames[0]) if code.co_argcount else None


def _arguments(frame: FrameType) -> Iterator[tuple[str, Any]]:
    """Yield the arguments of a call, by name, as they are now."""
    code = frame.f_code
    for name in code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]:
        if name not in ("self", "cls") and name in frame.f_locals:
            yield name, frame.f_locals[name]


def _with(frame: FrameType) -> str:
    given = ", ".join(f"{name}={spelled(value)}" for name, value in [*_arguments(frame)][:6])
    return f" with {given}" if given else ""


def _brief(module: Any) -> str:
    text = " ".join(repr(module).split())
    return text if len(text) <= 100 else type(module).__name__


def _batch(frames: list[tuple[FrameType, int]]) -> Any:
    for frame, _ in frames:
        holds = str(frame.f_globals.get("__name__")).startswith(_HOLDS_BATCH)
        if holds and frame.f_locals.get("batch") is not None:
            return frame.f_locals["batch"]
    return None


def _asked(error: BaseException) -> str:
    """Return the target for which a module of the user's was being imported."""
    asked = getattr(error, "imported_for", None)
    return f" (imported for the _target_ {asked!r})" if asked else ""
