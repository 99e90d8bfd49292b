"""The failures a run can end with, and descriptions of errors in code that a user wrote.

Each failure has an exit code, and its text names a solution. Errors in a user's code are described
from their tracebacks: a run without errors pays nothing. Needs no torch.
"""

import inspect
import multiprocessing
import os
import re
import signal
import sysconfig
from collections.abc import Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from traceback import walk_tb
from types import FrameType
from typing import Any, NoReturn

from regimen.conf.errors import ConfigError, lacks_memory
from regimen.conf.interpolation import under
from regimen.conf.layout import PACKAGES, ROOT

# The signals that end a run, and their exit codes. Batch systems send SIGUSR1 ahead of a
# preemption, a terminal sends SIGHUP when it is closed: both count as SIGTERM.
EXIT_CODES = {signal.SIGINT: 130, signal.SIGTERM: 143, signal.SIGUSR1: 143, signal.SIGHUP: 143}

# The types of errors that torch's and our modules raise for tensors that do not fit each other.
SHAPE_ERRORS = (
    RuntimeError,
    TypeError,
    ValueError,
    LookupError,
    AttributeError,
    AssertionError,  # of torchvision and timm, for images of another size and wrong boxes
)
# Packages whose errors are not attributed to the user's code.
_LIBRARIES = (
    *("torch", "torchvision", "timm", "torchmetrics", "hydra"),
    *("regimen.models", "regimen.trainer", "regimen.data"),
)
# Those among them whose errors come from another process, or hide where they come from.
_FOREIGN = ("torch.distributed", "torch.nn.parallel", "torch._utils", "torch.accelerator")
# How the drivers of devices begin their errors: CUDA error, HIP error, XPU error.
_DEVICE_ERROR = re.compile(r"\b[A-Z]{3,} error\b")
# Messages of a device that cannot compute something, whatever the shapes: it lacks an operator; a
# library reports an error or a status (cuDNN error, miopenStatusUnknownError, synStatus=26,
# PI_ERROR_INVALID_QUEUE); a kernel or a format is missing.
_KINDS = r"(\w* )?(device|backend|framework|CUDA|HIP|ROCm|MPS|XPU|NPU|HPU|MUSA|MTIA|GPU)s?\b"
_REFUSED_BY_DEVICE = re.compile(
    r"'\w+::[\w.]+'.* (from|for|on) the |\boperator\b.* not (currently )?(implemented|supported)"
    r"|\b(?=\w*[A-Z]\w*[A-Z])\w+( \w+){0,2} ([Ee]rror|[Ff]ail(ed|ure))\b"
    r"|\b[a-z]+(Status|Error)([A-Z]\w*|=)|\b[A-Z]\w*_(STATUS|ERROR|RESULT)_\w+|[Ee]rror code\b"
    r"|(unable to find|no) (an engine|available kernel|valid kernel|kernel image)"
    r"|INTERNAL ASSERT FAILED|Required aspect \w+ is not supported"
    rf"|\b[Dd]evice(-side assert| lost| is lost| hung)|\b{_KINDS} failed"
    rf"|\b{_KINDS}( does not| doesn't| cannot) (yet )?support"
    rf"|not (currently |yet )?(supported|implemented) (on|by|in|for) (the )?'?{_KINDS}"
)
_ON_CPU = re.compile(r"(from|for|on) the '?\w*CPU\b")
# Patterns of messages, and the smallest change that helps: `{}` are the groups of the pattern.
_SOLUTIONS = {
    r"mat1 and mat2 shapes cannot be multiplied \(\d+x(\d+) and (\d+)x\d+\)": (
        "the layer expects {1} features and got {0}: build it with in_features={0}"
    ),
    r"to have (\d+) channels, but got (\d+) channels": (
        "the layer expects {0} channels and got {1}: build it with in_channels={1}"
    ),
    r"(?:mat1 and mat2|m1 and m2) (?:must|to) have the same dtype, but got:? (\w+) (?:and|!=) (\w+)"
    r"|Input type \((.+?)\) and (?:bias|weight) type \((.+?)\)": (
        "the parameters are of another type than the inputs: what the data set returns as inputs "
        "should be float32, as inputs.float() is, or bytes of a picture that transforms convert "
        "(regimen.data.transforms.ToFloat)"
    ),
    r"Target (-?\d+) is out of bounds": (
        "the labels must lie between 0 and the number of outputs less one: give the model an "
        "output for label {0} (model.num_classes), or number the labels from 0"
    ),
    r"required (?:positional|keyword-only) argument|positional arguments? but|unexpected keyword": (
        "let its parameters agree with the call, or give the further ones defaults"
    ),
    r"No module named '([\w.]+)'": "install {0}, or correct the import",
}

_LESS_MEMORY = (
    "raise trainer.gradient_accumulation_steps (the same training in less memory), set "
    "trainer.activation_checkpointing or trainer.precision=bf16, or lower loader.batch_size"
)


def stopping_signals() -> list[signal.Signals]:
    """Return the signals that end a run here: nohup ignores SIGHUP, and so does a run under it."""
    ignores_hangup = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    return [n for n in EXIT_CODES if not (ignores_hangup and n == signal.SIGHUP)]


class RunError(Exception):
    """A failure with a known cause: printed as one `error:` line, without a traceback."""

    exit_code = 1


class CheckpointError(RunError):
    """A checkpoint that cannot be used, or a resume that was refused."""

    exit_code = 4


class DivergedError(RunError):
    """The loss or a gradient is not finite."""

    exit_code = 5


class PeerError(RunError):
    """Another process of the group failed or left."""

    exit_code = 6


class SilentPeerError(PeerError):
    """Another process of the group did not answer in time."""

    def __init__(self, timeout: timedelta) -> None:
        seconds = timeout.total_seconds()
        super().__init__(f"another process did not answer within {seconds:g} s (strategy.timeout)")


class StorageError(RunError):
    """A file of the run could not be written."""

    exit_code = 7


class ResourceError(RunError):
    """Memory or a worker process gave out."""

    exit_code = 8


class Interrupted(RunError):  # noqa: N818 (nothing went wrong)
    """A signal ended the run after its checkpoint was saved."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code


class ModelError(ConfigError, RunError):
    """A model that does not fit its task or its data."""


class UserCodeError(RunError):
    """A function of the user's that returned what it must not: shown with a traceback."""


class SampleError(RunError):
    """Samples that do not fit the task."""

    exit_code = 3


def leave_at_once(code: int) -> NoReturn:
    """End this process and its workers now: what is on disk is whole at every moment."""
    for child in multiprocessing.active_children():
        child.kill()
    os._exit(code)


def describe_value(value: Any) -> str:
    """Spell a value's structure briefly: types, and shapes of tensors and arrays."""
    if hasattr(value, "dtype") and hasattr(value, "shape"):
        return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}"
    if isinstance(value, Mapping):
        entries = [f"{key}: {describe_value(v)}" for key, v in [*value.items()][:8]]
        return "{" + ", ".join(entries) + "}"
    if isinstance(value, (list, tuple)):
        children = [describe_value(child) for child in value[:4]]
        if len(value) > 4:
            children.append("...")
        return "(" + ", ".join(children) + ")"
    if value is None or isinstance(value, bool | int | float):
        return str(value)
    return type(value).__name__


def unwrapped(thing: Any) -> Any:
    """Return the model within torch's wrappers: DDP, a compiled one."""
    while type(thing).__module__.startswith(("torch._dynamo", "torch.nn.parallel")):
        thing = thing._orig_mod if hasattr(thing, "_orig_mod") else thing.module
    return thing


def qualified_name(thing: Any) -> str:
    """Return the dotted name of an object's class; a wrapper of torch's stands for its model."""
    thing = unwrapped(thing)
    return f"{type(thing).__module__}.{type(thing).__qualname__}"


def is_user_code(file: str) -> bool:
    """Return whether a file of code is the user's: not ours, not installed, not Python's."""
    if file.startswith("<"):
        return file.startswith(("<ipython", "<stdin>"))
    path = Path(file)
    is_installed = "site-packages" in path.parts or "dist-packages" in path.parts
    if is_installed or path.is_relative_to(sysconfig.get_path("stdlib")):
        return False
    return not (path.is_relative_to(ROOT) and path.relative_to(ROOT).parts[0] in PACKAGES)


def describe_user_error(error: BaseException) -> str | None:
    """Summarize in one line where in user code `error` arose, with which arguments.

    None if it did not arise in user code.
    """
    if hasattr(error, "exit_code") or not isinstance(error, Exception | SystemExit):
        return None
    # Set where a module of the user's is imported for a `_target_`.
    target = getattr(error, "imported_for", None)
    suffix = f" (imported for the _target_ {target!r})" if target else ""
    if isinstance(error, SyntaxError) and error.filename and is_user_code(error.filename):
        return f"{error.filename}, line {error.lineno}, is not Python: {error.msg}{suffix}"

    frames = list(walk_tb(error.__traceback__))
    user_frames = [i for i, (f, _) in enumerate(frames) if is_user_code(f.f_code.co_filename)]
    if not user_frames:
        return None
    innermost = user_frames[-1]
    frame, line = frames[innermost]
    code = frame.f_code
    function = f"{frame.f_globals.get('__name__', '?')}.{code.co_qualname}"
    if code.co_qualname == "<module>":
        function = f"module {frame.f_globals.get('__name__', '?')}"
    arguments = [f"{name}={describe_value(value)}" for name, value in _arguments(frame)[:6]]
    given = f" with {', '.join(arguments)}" if arguments else ""
    reason = f"{type(error).__name__}: {short_message(error)}".rstrip(": ")
    parts = (
        f"{function} ({code.co_filename}, line {line}){given}: {reason}",
        _innermost_layer(frames[innermost:]),
        _solution(str(error)),
    )
    return "; ".join(filter(None, parts)) + suffix


def device_failed(error: BaseException) -> bool:
    """Return whether an accelerator itself failed."""
    if type(error).__name__ == "AcceleratorError":
        return True
    return isinstance(error, RuntimeError) and bool(_DEVICE_ERROR.search(str(error)))


def refused_by_device(error: BaseException) -> bool:
    """Return whether a device cannot compute what torch asked of it, or a library of it failed.

    Recognized by the type of the error and by its message, in the words of each vendor.
    """
    # TypeError: what MPS raises for a format that it lacks.
    if not isinstance(error, RuntimeError | TypeError):
        return False
    text = str(error)
    return bool(_REFUSED_BY_DEVICE.search(text)) and not _ON_CPU.search(text)


def explain_shape_error(
    error: Exception, batch: Any, updates: int, later: str = "this batch differs from those before"
) -> RunError | None:
    """Return the error to raise if a batch does not fit; None if something else failed.

    Errors in the user's own code keep their traceback; so do those of memory, of a device or of
    another process. `updates`: the number of updates before; `later`: the message after the first.
    """
    if "more than 1 value per channel" in str(error):
        return SampleError(
            "BatchNorm has no statistics of a single sample: leave a short last batch out with "
            "loader.drop_last=true, or change loader.batch_size"
        )
    if not is_shape_error(error):
        return None
    reason = f"{short_message(error)} (batch: {describe_value(batch)})"
    if "regimen.trainer.tasks.losses" in _modules_of(error):
        if "class probabilities, got" in reason:
            return SampleError(
                "targets of one number for each class are probabilities, which are floats: return "
                f"target.float(), or the number of the class: {reason}"
            )
        if "'NoneType' object" in reason:
            return SampleError(
                "a label is None: return a number; samples without labels belong in data.predict: "
                f"{reason}"
            )
        if "Long" in reason or "must be Tensor, not" in reason:
            return SampleError(f"the loss asks for class numbers, which are integers: {reason}")
        return ModelError(f"task.loss does not take the model's output and the targets: {reason}")
    if updates:
        return SampleError(f"{later}: {reason}")
    solution = _solution(reason) or (
        "do model, data (channels, image size, classes), transforms and task agree?"
    )
    layer = _innermost_layer(list(walk_tb(error.__traceback__)))
    parts = (f"model and data do not fit: {reason}", layer, solution)
    return ModelError("; ".join(filter(None, parts)))


def is_shape_error(error: Exception) -> bool:
    """Return whether torch's or our modules, and no other code, raised the error."""
    if not isinstance(error, SHAPE_ERRORS) or hasattr(error, "exit_code"):
        return False
    if lacks_memory(error) or device_failed(error) or refused_by_device(error):
        return False
    modules = _modules_of(error)
    if modules[-1].startswith(_FOREIGN):
        return False
    if isinstance(error, AssertionError) and modules[-1].startswith("regimen."):
        return False  # a mistake of ours, which needs its traceback
    return all(under(module, _LIBRARIES) for module in modules)


def _modules_of(error: Exception) -> list[str]:
    """Return the modules of the frames that an error went through, the innermost last."""
    return [str(f.f_globals.get("__name__", "")) for f, _ in walk_tb(error.__traceback__)]


def _solution(message: str) -> str | None:
    for pattern, solution in _SOLUTIONS.items():
        match = re.search(pattern, message)
        if match:
            return solution.format(*match.groups())
    return None


def _innermost_layer(frames: Sequence[tuple[FrameType, int]]) -> str | None:
    """Describe the innermost layer that was running within the outermost module, and its input."""
    modules = [f for f, _ in frames if hasattr(f.f_locals.get("self"), "named_modules")]
    for frame in reversed(modules):
        layer = frame.f_locals["self"]
        model = modules[0].f_locals["self"]
        name = next((name for name, child in model.named_modules() if child is layer), "")
        if name and frame.f_code.co_name == "forward":
            given = ", ".join(describe_value(value) for _, value in _arguments(frame))
            kind = " ".join(repr(layer).split())
            if len(kind) > 100:
                kind = type(layer).__name__
            return f"{name}, {kind}, was given {given}"
    return None


def _arguments(frame: FrameType) -> list[tuple[str, Any]]:
    names, _, _, values = inspect.getargvalues(frame)  # as they are when the error arose
    return [(n, values[n]) for n in names if n not in ("self", "cls") and n in values]


def short_message(error: Exception | SystemExit) -> str:
    """Return the message of an error as one line of at most 500 characters."""
    return " ".join(str(error).split())[:500]


def exit_code(error: BaseException) -> int:
    """Return the exit code of an exception; 1 for an unexpected one."""
    if isinstance(error, KeyboardInterrupt):
        return 130
    if lacks_memory(error) or device_failed(error):
        return ResourceError.exit_code
    code = getattr(error, "exit_code", 1)
    return code if isinstance(code, int) else 1


def describe(error: BaseException) -> str:
    """Return the message of an exception, or the name of its type if it has none."""
    text = str(error).strip()
    first = text.partition("\n")[0]
    if lacks_memory(error):
        return f"out of memory: {first or 'no memory is left'}; {_LESS_MEMORY}"
    if hasattr(error, "exit_code") or exit_code(error) != 1:
        return text or type(error).__name__
    message = describe_user_error(error) or f"{type(error).__name__}: {first}".rstrip(": ")
    if refused_by_device(error):
        return (
            f"{message}; the device cannot compute this: strategy.accelerator=cpu does without it"
        )
    return message
