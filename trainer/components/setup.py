"""Arguments of a Trainer from Python: refused if misplaced, and set up as `build` does it."""

import functools
import inspect
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from regimen.conf.errors import ConfigError, Problem, did_you_mean, raise_problems
from regimen.conf.python_words import in_python
from regimen.conf.schema_trainer import TrainerConfig
from regimen.trainer.callback import Callback
from regimen.trainer.components.precision import compiled_model, compiled_regions
from regimen.trainer.components.recompute import recompute_as_asked
from regimen.trainer.errors import (
    RunError,
    UserCodeError,
    describe_user_error,
    describe_value,
)
from regimen.trainer.optimizers.optimizers import Optimizers
from regimen.trainer.options import TrainerOptions
from regimen.trainer.state import monitored_names
from regimen.trainer.task import Task


def refuse_misplaced(model: Any, task: Any, optimizer: Any) -> None:
    """Raise TypeError, in one line with the way out, for an argument in another one's place."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"model is {_describe(model)}: give an object of a torch.nn.Module")
    if not hasattr(task, "own_modules") or isinstance(task, type):
        raise TypeError(
            f"task is {_describe(task)}, and not a task: give regimen.Regression() or "
            "regimen.Classification(num_classes=...), each of which takes another loss as "
            "loss=..., or a class of your own over regimen.Task"
        )
    if not isinstance(optimizer, Optimizers | torch.optim.Optimizer):
        raise TypeError(
            f"optimizer is {_describe(optimizer)}: give an object such as "
            "torch.optim.AdamW(model.parameters(), lr=1e-3)"
        )


def _describe(argument: Any) -> str:
    """Describe an argument: a class or a function by its name, anything else by its type."""
    if isinstance(argument, type):
        return f"the class {argument.__name__}"
    if isinstance(argument, functools.partial) or inspect.isroutine(argument):
        function = getattr(argument, "func", argument)
        return f"the function {getattr(function, '__name__', function)}"
    if isinstance(argument, nn.Module):
        return f"a {type(argument).__name__}"
    return describe_value(argument)


def is_from_python(options: TrainerConfig) -> bool:
    """Return whether options were made in Python, and not by a configuration."""
    return isinstance(options, TrainerOptions)


def set_up(
    model: nn.Module, compiled: nn.Module | None, options: TrainerConfig, precision: str
) -> nn.Module:
    """Do what options made in Python ask of torch and of the model; return it, or it compiled.

    `compiled`: the model as the caller has compiled it already. `precision`: its name. For the
    options of a configuration nothing is left to do: `build` has done it. torch's switches hold for
    the process: they are set where one is asked for, and otherwise left as they are.
    """
    if not is_from_python(options):
        return model if compiled is None else compiled
    asks_for_switches = options.deterministic or options.cudnn_benchmark or options.tf32
    if asks_for_switches or precision == "tf32":
        set_switches(replace(options, precision=precision))  # type: ignore[arg-type]
    if options.detect_anomaly:
        torch.autograd.set_detect_anomaly(True)
    if options.channels_last:
        model.to(memory_format=torch.channels_last)
    with in_callers_words(options):
        recompute_as_asked(model, options)
        if compiled is not None:
            return compiled
        return compiled_model(model, options.compile, compiled_regions(model, options.compile))


def set_switches(options: TrainerConfig) -> dict[str, bool]:
    """Set torch's global flags for this process; return their values, for the manifest.

    `deterministic` raises for nondeterministic operations and disables cuDNN's benchmark, whose
    choice depends on timing. Call this before CUDA is used: cuBLAS reads its environment variable
    once.
    """
    deterministic = options.deterministic
    if deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    benchmark = options.cudnn_benchmark and not deterministic
    tf32 = options.tf32 or options.precision == "tf32"
    if deterministic or torch.are_deterministic_algorithms_enabled():
        torch.use_deterministic_algorithms(deterministic)  # imports torch's compiler: seconds
    torch.backends.cudnn.deterministic = deterministic
    torch.backends.cudnn.benchmark = benchmark
    # The older flags set the newer ones (`fp32_precision`) as well. After setting the newer ones
    # torch raises where the older are read, as `torch.backends.cudnn.flags()` does. Only CUDA's
    # flags are set: the global one would change matrix products on some CPUs as well.
    torch.backends.cuda.matmul.allow_tf32 = tf32
    torch.backends.cudnn.allow_tf32 = tf32
    return {"deterministic": deterministic, "cudnn_benchmark": benchmark, "tf32": tf32}


def refuse_monitors(callbacks: Iterable[Callback], task: Task, stages: Iterable[str]) -> None:
    """Raise ConfigError for callbacks that monitor what the run does not log.

    Nothing is refused where a callback of the caller's own may log it.
    """
    callbacks = list(callbacks)
    if any(not type(callback).__module__.startswith("regimen.") for callback in callbacks):
        return  # what a callback of the caller's own logs is not known before it does
    metrics = monitored_names(task.metric_names(), list(stages) or ["val"])
    raise_problems(_unknown_monitors(callbacks, metrics))


def _unknown_monitors(callbacks: Iterable[Callback], metrics: list[str]) -> Iterator[Problem]:
    for callback in callbacks:
        monitor = getattr(callback, "monitor", None)
        if isinstance(monitor, str) and monitor not in ("auto", *metrics):
            yield Problem(
                f"callbacks[{callback.name!r}].monitor",
                f"{monitor}: no such metric; there are: {', '.join(sorted(metrics))}",
                did_you_mean(monitor, metrics) or "the task's metric_names() name what it computes",
            )


def tell_in_python(error: BaseException) -> None:
    """Let one of our errors advise calls and arguments, in place of keys of a configuration.

    Its traceback is short: it ends with one line.
    """
    if not hasattr(error, "exit_code"):
        return
    if not isinstance(error, UserCodeError):
        # What torch raised first says less, and is many lines.
        error.__cause__ = None
        error.__suppress_context__ = True
    if isinstance(error, ConfigError):
        error.change(_problem_in_python)
    elif isinstance(error, RunError):
        error.args = (in_python(str(error)), *error.args[1:])


def explain_error(error: BaseException, options: TrainerConfig) -> None:
    """Add a note to an error of the user's code: where it arose, and with what."""
    note = describe_user_error(error)
    if is_from_python(options):
        tell_in_python(error)
        note = None if note is None else in_python(note)
    if note is not None:
        error.add_note(note)  # below the traceback, in a notebook too


@contextmanager
def in_callers_words(options: TrainerConfig) -> Iterator[None]:
    """Tell the errors within in the words of who made the options."""
    try:
        yield
    except Exception as error:
        if is_from_python(options):
            tell_in_python(error)
        raise


def _problem_in_python(problem: Problem) -> Problem:
    hint = None if problem.hint is None else in_python(problem.hint)
    message = in_python(problem.message)
    return replace(problem, key=in_python(problem.key), message=message, hint=hint)
