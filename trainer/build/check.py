"""Mistakes in targets and monitors, found before data are read or a device is touched (I9)."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from difflib import get_close_matches
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from conf.errors import ConfigError, Problem
from conf.reserved import fill
from conf.schema import Config
from trainer.build.data import with_classes
from trainer.build.experiment import build_task, is_refused_model, refused_model
from trainer.build.loss_check import loss_problems
from trainer.build.node_kinds import misfit, misfit_of
from trainer.build.nodes import optimizer_nodes
from trainer.build.trial import check_optimization
from trainer.errors import RunError
from trainer.lr_schedulers.nodes import target_nodes as schedule_nodes
from trainer.metric_names import epoch_metric
from trainer.optimizers.nodes import SINGLE, UNSHARDED, sections
from trainer.optimizers.param_groups import ParamGroupError
from trainer.optimizers.steps import takes_closure
from trainer.targets.allow_list import TargetError, locate
from trainer.targets.instantiate import instantiate, refused_targets
from trainer.targets.signatures import TargetProblem, bind_problems
from trainer.task import named_modules
from trainer.update.gradients import without_effect

# Stand-ins for what is known only once the data are open.
_LENGTHS = {"total_steps": 1000, "steps_per_epoch": 100}
_CLASSES = 10
_CALLED_WITH = {
    "data": ("transform",),
    "loader.sampler": ("dataset", "data_source", "targets", "seed"),
    "loader.batch_sampler": ("dataset", "data_source", "targets", "seed"),
}


def check_targets(config: Config) -> None:
    """Raise ConfigError with everything that is wrong with the targets of a configuration.

    First whether they may be used at all, then their arguments, then what their constructors and
    the rest of the configuration make of them: each stage rests on the one before.
    """
    nodes = dict(_nodes(config))
    _complain(_compile_problems(config.trainer.compile))
    _complain(p for key, (node, _) in nodes.items() for p in refused_targets(node, key))
    _complain(
        problem
        for key, (node, positional) in nodes.items()
        for problem in _node_problems(node, key, positional)
    )
    monitors = [*_task_problems(config), *_sharding_problems(config)]
    about = tuple(p.key.rpartition(".")[0] for p in monitors)
    others = [
        *_search_problems(config),
        *_constructor_problems(config),
        *_model_problems(config),
    ]
    _complain([*monitors, *(p for p in others if p.key not in about)])


def _compile_problems(choice: bool | dict[str, Any]) -> Iterator[Problem]:
    """Hold a backend and the options of the default one against what torch has."""
    if not isinstance(choice, dict) or not (choice.get("backend") or choice.get("options")):
        return  # asking takes torch's compiler, which is slow to import
    backend = choice.get("backend") or "inductor"
    known = torch.compiler.list_backends(exclude_tags=())
    if backend not in known:
        hint = f"there are {', '.join(known)}"
        yield Problem("trainer.compile.backend", f"no backend {backend!r} is registered", hint=hint)
    elif backend == "inductor":
        from torch._inductor import list_options  # the package is large, and seldom needed

        options = [name.replace("-", "_") for name in choice.get("options") or {}]
        for name in sorted(set(options) - set(list_options())):
            yield Problem(f"trainer.compile.options.{name}", "torch has no such option")


def _node_problems(
    node: Any, key: str, positional: int
) -> Iterable[TargetProblem] | Iterable[Problem]:
    """Hold a node against its section, then its arguments against the target's signature."""
    wrong = _wrong_kind(key, node)
    return [wrong] if wrong else bind_problems(node, key, _provided(key), positional)


def _wrong_kind(key: str, node: Any) -> Problem | None:
    """Name a class that makes something else than the section takes; a function is called later."""
    if not isinstance(node, dict) or "_target_" not in node:
        return None
    try:
        target = functools.partial if node.get("_partial_") is True else locate(node["_target_"])
    except TargetError:
        return None  # its arguments' check says so
    reason = misfit(key, target) if isinstance(target, type) else None
    return Problem(f"{key}._target_", reason) if reason else None


def _complain(found: Iterable[TargetProblem | Problem]) -> None:
    problems = [
        p if isinstance(p, Problem) else Problem(p.key, p.message, hint=p.hint) for p in found
    ]
    if problems:
        raise ConfigError(problems)


def _constructor_problems(config: Config) -> Iterator[Problem]:
    """Build what costs nothing to build, and report the values that are objected to."""
    nodes = {"task": with_classes(config.task, _CLASSES)}
    callbacks = fill(config.callbacks, _LENGTHS)
    nodes |= {f"callbacks.{name}": node for name, node in callbacks.items() if node}
    for stage in ("train", "eval", "device"):
        steps = with_classes(getattr(config.transforms, stage), _CLASSES)
        nodes |= {f"transforms.{stage}.{name}": node for name, node in steps.items() if node}
    for key, node in nodes.items():
        try:
            made = instantiate(node, _key_=key)
        except Exception as error:
            if not isinstance(getattr(error, "exit_code", None), int):
                raise
            yield Problem(key, str(error).removeprefix(f"{key}: "))
        else:
            if (reason := misfit_of(key, made)) is not None:
                yield Problem(f"{key}._target_", reason)
    yield from (Problem(*found) for found in loss_problems(nodes["task"].get("loss"), "task.loss"))


def _model_problems(config: Config) -> Iterator[Problem]:
    """Build the model without storage, and hold optimizer and schedule against it."""
    node = with_classes(config.model, _CLASSES)
    try:
        with torch.device("meta"):
            model = instantiate(node, _key_="model")
    except Exception as error:
        # Not every network can be built without storage: what only that forbids shows later.
        cause = error.__cause__
        if isinstance(cause, (TypeError, ValueError, AssertionError)) or _is_model_error(error):
            yield Problem("model", str(error).removeprefix("model: "))
        elif is_refused_model(error) and "meta" not in str(error).lower():
            yield Problem("model", refused_model(config.model, error))
        return
    if not isinstance(model, nn.Module):
        yield Problem("model._target_", str(misfit_of("model", model)))
        return
    if any(is_lazy(parameter) for parameter in model.parameters()):
        yield Problem("model", "has lazy parameters", hint="give its layers their sizes")
        return
    try:
        others = _task_modules(config)
        check_optimization(model, config.optimizer, config.lr_scheduler, others)
    except ParamGroupError as error:
        for text in error.args:
            key, _, message = text.partition(": ")
            yield Problem(key, message) if " " not in key else Problem("optimizer", text)


def _task_modules(config: Config) -> dict[str, nn.Module]:
    try:
        return named_modules(build_task(config, _CLASSES))
    except Exception:  # told where the task is checked
        return {}


def _is_model_error(error: Exception) -> bool:
    return getattr(error, "exit_code", None) == ConfigError.exit_code and error.__cause__ is None


def _nodes(config: Config) -> Iterator[tuple[str, tuple[Any, int]]]:
    """Yield every node with a target, its key, and how many arguments the caller adds."""
    yield "model", (with_classes(config.model, _CLASSES), 0)
    yield "task", (with_classes(config.task, _CLASSES), 0)
    for split in ("train", "val", "test", "predict"):
        yield f"data.{split}", (getattr(config.data, split), 0)
    for stage in ("train", "eval", "device"):
        steps = with_classes(getattr(config.transforms, stage), _CLASSES)
        for name, node in steps.items():
            yield f"transforms.{stage}.{name}", (node, 0)
    for name in ("sampler", "batch_sampler", "collate_fn", "worker_init_fn"):
        yield f"loader.{name}", (getattr(config.loader, name), 0)
    for name, node in fill(config.callbacks, _LENGTHS).items():
        yield f"callbacks.{name}", (node, 0)
    for key, node in optimizer_nodes(fill(config.optimizer, _LENGTHS)).items():
        yield key, (node, 1)
    if config.lr_scheduler:
        for key, node in schedule_nodes(
            fill(config.lr_scheduler, _LENGTHS), "lr_scheduler"
        ).items():
            yield key, (node, 1)


def _provided(key: str) -> tuple[str, ...]:
    return next((names for prefix, names in _CALLED_WITH.items() if key.startswith(prefix)), ())


def _task_problems(config: Config) -> Iterator[Problem]:
    try:
        task = build_task(config, _CLASSES)
    except RunError:  # its constructor's complaint says more
        return
    yield from _turn_problems(config, task.turns)
    yield from _monitor_problems(config, task.metric_names())


def _turn_problems(config: Config, turns: Sequence[str]) -> Iterator[Problem]:
    several = config.optimizer.get("optimizers") or {SINGLE: config.optimizer}
    names = [name for name, node in several.items() if node]
    if turns and set(turns) != set(names):
        yield Problem(
            "optimizer.optimizers",
            f"the optimizers are {', '.join(names)}, but those of task.turns {', '.join(turns)}",
            hint="a task that takes turns has one optimizer for each, such as optimizer=gan",
        )


def _search_problems(config: Config) -> Iterator[Problem]:
    """Find what has no effect on an optimizer that computes its gradients by itself."""
    nodes = optimizer_nodes(fill(config.optimizer, _LENGTHS))
    kinds = [locate(node["_target_"]) for node in nodes.values()]
    searching = [k.__name__ for k in kinds if isinstance(k, type) and takes_closure(k)]
    options = config.trainer
    found = without_effect(
        options.precision, options.clip_grad_norm, options.clip_grad_value, options.gradient_noise
    )
    for key in found if searching else ():
        yield Problem(
            f"trainer.{key}",
            f"cannot reach the gradients that {searching[0]} computes by itself",
            hint="leave it out, or take another optimizer",
        )


def _sharding_problems(config: Config) -> Iterator[Problem]:
    """Name the optimizers that look at whole parameters, which no process has under fsdp."""
    if config.strategy.name != "fsdp":
        return
    for section in sections(config.optimizer, "optimizer", []):
        kind = locate(section.target["_target_"])
        if isinstance(kind, type) and issubclass(kind, UNSHARDED):
            yield Problem(
                f"{section.key}._target_",
                f"{kind.__name__} cannot train what strategy=fsdp shards",
                hint="strategy=ddp keeps parameters whole; most other optimizers train shards",
            )


def _monitor_problems(config: Config, names: Sequence[str]) -> Iterator[Problem]:
    known = [f"{stage}/{name}" for stage in ("val", "train") for name in names]
    known.append("train/grad_norm")
    known += [epoch_metric(name) for name in known if name.startswith("train/")]
    for key, monitor in _monitors(config):
        follows = key.endswith("lr_scheduler.monitor") and str(monitor).startswith("val/")
        if follows and config.data.val is None and config.trainer.overfit_batches is None:
            message = f"{monitor!r} would never come: data.val is null"
            yield Problem(key, message, hint="follow train/loss")
        if monitor not in (None, "auto", *known):
            close = get_close_matches(str(monitor), known, n=1)
            meant = f"did you mean {close[0]}?" if close else None
            yield Problem(key, f"{monitor!r} is none of {', '.join(known)}", hint=meant)


def _monitors(config: Config) -> Iterator[tuple[str, Any]]:
    several = config.optimizer.get("optimizers") or {}
    sections: Mapping[str, Any] = {
        "lr_scheduler": config.lr_scheduler,
        **{
            f"optimizer.optimizers.{name}.lr_scheduler": (node or {}).get("lr_scheduler")
            for name, node in several.items()
        },
        **{f"callbacks.{name}": node for name, node in config.callbacks.items()},
    }
    for key, node in sections.items():
        if node and "monitor" in node:
            yield f"{key}.monitor", node["monitor"]
