"""Mistakes in targets and monitors, found before data are read or a device is touched (I9)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from typing import Any

from conf.errors import ConfigError, Problem
from conf.reserved import fill
from conf.schema import Config
from trainer import lr_schedule, optimizers
from trainer.build import build_task, with_classes
from trainer.instantiate import build_problems, refused_targets
from trainer.signatures import TargetProblem, bind_problems, hides_arguments

# Stand-ins for what is known only once the data are open.
_LENGTHS = {"total_steps": 1000, "steps_per_epoch": 100}
_CLASSES = 10
_CALLED_WITH = {
    "data": ("transform",),
    "loader.sampler": ("dataset", "data_source", "targets", "seed"),
    "loader.batch_sampler": ("dataset", "data_source", "targets", "seed"),
}


def check_targets(config: Config) -> None:
    """Raise ConfigError with everything that is wrong with the targets of a configuration."""
    nodes = dict(_nodes(config))
    refused = [p for key, (node, _) in nodes.items() for p in refused_targets(node, key)]
    if refused:
        raise ConfigError([_problem(p) for p in refused])
    found = [
        problem
        for key, (node, positional) in nodes.items()
        for problem in bind_problems(node, key, _provided(key), positional)
    ]
    if found:
        raise ConfigError([_problem(p) for p in found])
    model = with_classes(config.model, _CLASSES)
    if hides_arguments(model):
        found = build_problems(model, "model")
    problems = [_problem(p) for p in found] or list(_monitor_problems(config))
    if problems:
        raise ConfigError(problems)


def _nodes(config: Config) -> Iterator[tuple[str, tuple[Any, int]]]:
    """Yield every node with a target, its key, and how many arguments the caller adds."""
    yield "model", (with_classes(config.model, _CLASSES), 0)
    yield "task", (with_classes(config.task, _CLASSES), 0)
    for split in ("train", "val", "test", "predict"):
        yield f"data.{split}", (getattr(config.data, split), 0)
    for stage in ("train", "eval", "device"):
        for name, node in getattr(config.transforms, stage).items():
            yield f"transforms.{stage}.{name}", (node, 0)
    for name in ("sampler", "batch_sampler", "collate_fn", "worker_init_fn"):
        yield f"loader.{name}", (getattr(config.loader, name), 0)
    for name, node in fill(config.callbacks, _LENGTHS).items():
        yield f"callbacks.{name}", (node, 0)
    for key, node in optimizers.target_nodes(fill(config.optimizer, _LENGTHS)).items():
        yield key, (node, 1)
    if config.lr_scheduler:
        for key, node in lr_schedule.target_nodes(
            fill(config.lr_scheduler, _LENGTHS), "lr_scheduler"
        ).items():
            yield key, (node, 1)


def _provided(key: str) -> tuple[str, ...]:
    return next((names for prefix, names in _CALLED_WITH.items() if key.startswith(prefix)), ())


def _problem(problem: TargetProblem) -> Problem:
    return Problem(problem.key, problem.message, hint=problem.hint)


def _monitor_problems(config: Config) -> Iterator[Problem]:
    names = build_task(config, _CLASSES).metric_names()
    known = [f"{stage}/{name}" for stage in ("val", "train") for name in names]
    known.append("train/grad_norm")
    for key, monitor in _monitors(config):
        if monitor not in (None, "auto", *known):
            close = get_close_matches(str(monitor), known, n=1)
            meant = f"did you mean {close[0]}?" if close else None
            yield Problem(key, f"{monitor!r} is none of {', '.join(known)}", hint=meant)


def _monitors(config: Config) -> Iterator[tuple[str, Any]]:
    sections: Mapping[str, Any] = {
        "lr_scheduler": config.lr_scheduler,
        **{f"callbacks.{name}": node for name, node in config.callbacks.items()},
    }
    for key, node in sections.items():
        if node and "monitor" in node:
            yield f"{key}.monitor", node["monitor"]
