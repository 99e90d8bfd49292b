"""What a person gives to a Trainer from Python: refused if misplaced, set up as `build` does."""

import functools
import inspect
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
from regimen.trainer.errors import RunError, UserCodeError, describe_value
from regimen.trainer.optimizers.optimizers import Optimizers
from regimen.trainer.options import TrainerOptions
from regimen.trainer.rng import set_switches
from regimen.trainer.state import monitored_names
from regimen.trainer.strategies.strategy import instances
from regimen.trainer.task import Task
from regimen.trainer.update.precision import (
    checkpoint_modules,
    checkpoint_segments,
    compiled_model,
)


def refuse_misplaced(model: Any, task: Any, optimizer: Any) -> None:
    """Raise TypeError, in one line with the way out, for what stands in another's place."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"model is {_named(model)}: give an object of a torch.nn.Module")
    if not hasattr(task, "own_modules") or isinstance(task, type):
        raise TypeError(
            f"task is {_named(task)}, and not a task: give Classification(num_classes=...) or "
            "Regression() of regimen.trainer.tasks, each of which takes another loss as loss=..., "
            "or a class of your own over regimen.Task"
        )
    if not isinstance(optimizer, Optimizers | torch.optim.Optimizer):
        raise TypeError(
            f"optimizer is {_named(optimizer)}: give an object such as "
            "torch.optim.AdamW(model.parameters(), lr=1e-3)"
        )


def _is_function(thing: Any) -> bool:
    return isinstance(thing, functools.partial) or inspect.isroutine(thing)


def _named(thing: Any) -> str:
    """Return what something is: a class or a function by its name, anything else by its kind."""
    if isinstance(thing, type):
        return f"the class {thing.__name__}"
    if _is_function(thing):
        function = getattr(thing, "func", thing)
        return f"the function {getattr(function, '__name__', function)}"
    return f"a {type(thing).__name__}" if isinstance(thing, nn.Module) else describe_value(thing)


def is_from_python(options: TrainerConfig) -> bool:
    """Return whether options were made in Python, and not by a configuration."""
    return isinstance(options, TrainerOptions)


def set_up(
    model: nn.Module, compiled: nn.Module | None, options: TrainerConfig, precision: str
) -> nn.Module:
    """Do what options made in Python ask of torch and of the model; return it, or it compiled.

    `compiled`: as the caller has compiled it already. `build` has done it for the options of a
    configuration. torch's switches hold for the process: they are set where one is asked for, and
    otherwise left as they are. `precision`: its name.
    """
    if not is_from_python(options):
        return model if compiled is None else compiled
    asks = options.deterministic or options.cudnn_benchmark or options.tf32
    if asks or precision == "tf32":
        set_switches(replace(options, precision=precision))  # type: ignore[arg-type]
    if options.detect_anomaly:
        torch.autograd.set_detect_anomaly(True)
    if options.channels_last:
        model.to(memory_format=torch.channels_last)
    compiles = options.compile is not False
    if options.activation_checkpointing_segments is not None:
        with in_callers_words(options):
            checkpoint_segments(model, options.activation_checkpointing_segments, compiles)
    with in_callers_words(options):
        checkpoint_modules(model, options.activation_checkpointing or [], compiles)
    if compiled is not None:
        return compiled
    regions = None
    if isinstance(options.compile, dict) and options.compile.get("regions") is not None:
        regions = instances(model, options.compile["regions"], "TrainerOptions.compile.regions")
    return compiled_model(model, options.compile, regions)


def refuse_monitors(callbacks: Iterable[Callback], task: Task, stages: Iterable[str]) -> None:
    """Raise ConfigError for callbacks that monitor what the run does not log.

    Nothing is refused where a callback of the caller's own may log it.
    """
    callbacks = list(callbacks)
    if any(not type(callback).__module__.startswith("regimen.") for callback in callbacks):
        return  # what a callback of the caller's own logs is not known before it does
    known = monitored_names(task.metric_names(), list(stages) or ["val"])
    raise_problems(_unknown(callbacks, known))


def _unknown(callbacks: Iterable[Callback], known: list[str]) -> Iterator[Problem]:
    for callback in callbacks:
        monitor = getattr(callback, "monitor", None)
        if isinstance(monitor, str) and monitor not in ("auto", *known):
            yield Problem(
                f"callbacks[{callback.name!r}].monitor",
                f"{monitor}: no such metric; there are: {', '.join(sorted(known))}",
                did_you_mean(monitor, known) or "the task's metric_names() name what it computes",
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
