"""Find mistakes in targets and monitors before data are read or a device is used."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState
from torch.overrides import TorchFunctionMode

from conf.errors import ConfigError, Problem, did_you_mean, problems_at, raise_problems
from conf.interpolation import fill
from conf.schema import Config
from trainer.assembly.data import build_pipeline, build_transforms, cache_problems, fold_problems
from trainer.assembly.parts import Assembly, Known, optimizer_nodes, with_classes, wrong_class
from trainer.callback import Callback, check_hooks
from trainer.lr_schedulers.build import target_nodes as schedule_nodes
from trainer.metric_names import epoch_metric
from trainer.optimizers.optimizers import SINGLE, UNSHARDED, sections
from trainer.optimizers.steps import takes_closure
from trainer.options import horizon
from trainer.strategies.strategy import Strategy
from trainer.targets.allow_list import TargetError, locate
from trainer.targets.instantiate import instantiate
from trainer.targets.signatures import bind_problems, nodes_in
from trainer.task import Task, missing_step
from trainer.update.gradients import without_effect
from trainer.update.precision import Precision

# Placeholders for facts that are known only once the data are open.
_TOTAL_STEPS, _STEPS_PER_EPOCH = 1000, 100
_CLASSES = 10
_BY_CLASS = (nn.CrossEntropyLoss, nn.NLLLoss, nn.MultiMarginLoss)
_BY_VALUE = (
    *(nn.MSELoss, nn.L1Loss, nn.SmoothL1Loss, nn.HuberLoss, nn.SoftMarginLoss),
    *(nn.BCEWithLogitsLoss, nn.PoissonNLLLoss),
)
_CALLED_WITH = {
    "data": ("transform",),
    "loader.sampler": ("dataset", "data_source", "targets", "seed"),
    "loader.batch_sampler": ("dataset", "data_source", "targets", "seed"),
}


def check_targets(config: Config) -> None:
    """Raise ConfigError with all mistakes in the targets of a configuration.

    First what targets and arguments are, against signatures; if nothing is wrong with them, what
    is built of them on the meta device, as a run builds it.
    """
    parts = stand_ins(config)
    raise_problems(_compile_problems(config.trainer.compile))
    raise_problems(
        problem
        for key, node, positional in _nodes(config, parts.known)
        for problem in _node_problems(node, key, positional)
    )
    first = [*_task_problems(parts), *_sharding_problems(config), *_hook_problems(config)]
    about = {p.key.rpartition(".")[0] for p in first}
    others = [*_search_problems(config, parts.known), *_loss_problems(config)]
    others += [*_part_problems(parts), *fold_problems(config)]
    raise_problems([*first, *(p for p in others if p.key not in about)])


def stand_ins(config: Config) -> Assembly:
    """Return the parts of a run without data, device or storage."""
    options = config.trainer
    endless = horizon(options.max_epochs, options.max_steps, _STEPS_PER_EPOCH) is None
    total = None if endless else _TOTAL_STEPS
    known = Known(_CLASSES, total, _STEPS_PER_EPOCH, guessed=True)
    return Assembly(config, known, Strategy("meta"), Precision(options.precision))


def _compile_problems(choice: bool | dict[str, Any]) -> Iterator[Problem]:
    """Check the compiler's backend, and options of the default one, against torch's lists."""
    if not isinstance(choice, dict) or not (choice.get("backend") or choice.get("options")):
        return  # a check needs torch's compiler, which is slow to import
    backend = choice.get("backend") or "inductor"
    known = torch.compiler.list_backends(exclude_tags=())
    if backend not in known:
        hint = f"there are {', '.join(known)}"
        yield Problem("trainer.compile.backend", f"no backend {backend!r} is registered", hint=hint)
    elif backend == "inductor":
        from torch._inductor import list_options  # slow to import, and seldom needed

        options = [name.replace("-", "_") for name in choice.get("options") or {}]
        for name in sorted(set(options) - set(list_options())):
            yield Problem(f"trainer.compile.options.{name}", "torch has no such option")


def _node_problems(node: Any, key: str, positional: int) -> list[Problem]:
    """Check a node's kind, then its arguments; of functions, what they make is checked later."""
    if isinstance(node, dict) and "_target_" in node:
        with suppress(TargetError):  # reported with its arguments
            partial = node.get("_partial_") is True
            target = functools.partial if partial else locate(node["_target_"])
            if isinstance(target, type) and (reason := wrong_class(key, target)) is not None:
                return [Problem(f"{key}._target_", reason)]
    provided = (names for prefix, names in _CALLED_WITH.items() if key.startswith(prefix))
    return bind_problems(node, key, next(provided, ()), positional)


def _task_problems(parts: Assembly) -> Iterator[Problem]:
    """Build the task and check what depends on it; a bare task replaces a broken one."""
    try:
        task = parts.task
    except ConfigError as error:
        vars(parts)["task"] = Task()
        yield from error.problems
    else:
        step = "turn_step" if task.turns else "training_step"
        if getattr(type(task), step) is getattr(Task, step):
            yield Problem("task._target_", missing_step(type(task), step))
        yield from _turn_problems(parts.config, task.turns)
        yield from _monitor_problems(parts.config, task.metric_names())


def _loss_problems(config: Config) -> Iterator[Problem]:
    """Call torch's losses on two tiny samples: torch checks their arguments only when called."""
    for key, node in nodes_in(with_classes(config.task, _CLASSES).get("loss"), "task.loss"):
        if (kind := locate(node["_target_"])) not in (*_BY_CLASS, *_BY_VALUE):
            continue
        try:
            loss = instantiate(node, _key_=key)
            weights = [
                w for n in ("weight", "pos_weight") if (w := getattr(loss, n, None)) is not None
            ]
            output = torch.zeros(2, len(weights[0]) if weights and weights[0].ndim else 3)
            by_class = torch.zeros(2, dtype=torch.int64)
            loss(output, by_class if kind in _BY_CLASS else torch.zeros_like(output))
        except ConfigError:
            continue  # of its constructor: reported with the task's
        except (ValueError, RuntimeError) as error:
            yield Problem(key, f"{node['_target_']}: {error}")


def _part_problems(parts: Assembly) -> Iterator[Problem]:
    """Build the other parts that need no data, and yield their problems."""
    config = parts.config
    yield from _objections(lambda: parts.callbacks)
    for name, callback in vars(parts).get("callbacks", {}).items():
        yield from _objections(functools.partial(_check_hooks, name, callback))
    for stage in ("train", "eval", "device"):
        yield from _objections(functools.partial(build_transforms, config, stage, _CLASSES))
    yield from cache_problems(config, functools.partial(build_pipeline, config))
    yield from _model_problems(parts)
    if "model" in vars(parts):
        yield from _objections(lambda: parts.checkpointed)
        yield from _objections(lambda: parts.schedule)
        if "optimizers" in vars(parts):
            yield from _sparse_problems(parts)
        if "callbacks" in vars(parts):
            for name in parts.callbacks:
                yield from _objections(functools.partial(_check_callback, parts, name))


def _check_hooks(name: str, callback: Callback) -> None:
    with problems_at(f"callbacks.{name}"):
        check_hooks(callback)


def _check_callback(parts: Assembly, name: str) -> None:
    with problems_at(f"callbacks.{name}"):
        parts.callbacks[name].check(parts.model)


def _objections(build: Callable[[], Any]) -> list[Problem]:
    try:
        build()
    except ConfigError as error:
        return error.problems
    return []


def _model_problems(parts: Assembly) -> list[Problem]:
    """Build the model on the meta device; networks that cannot be are not checked here."""
    try:
        with parts.strategy.device, _Unfilled():
            _ = parts.model
    except ConfigError as error:
        return [] if _lacks_storage(error.__cause__) else error.problems
    except Exception:
        return []
    return []


class _Unfilled(TorchFunctionMode):
    """Leave `normal_` out on the meta device, where torch would import sympy for it."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Return the tensor as it is, or what any other function returns."""
        if func in (torch.Tensor.normal_, nn.init.normal_):
            tensor = args[0] if args else kwargs["tensor"]
            if tensor.is_meta:
                return tensor
        return func(*args, **(kwargs or {}))


def _lacks_storage(error: BaseException | None) -> bool:
    """Return whether an exception says that a tensor on the meta device has no data."""
    named = isinstance(error, RuntimeError) and "meta" in str(error).lower()
    return named or isinstance(error, NotImplementedError)


def _nodes(config: Config, known: Known) -> Iterator[tuple[str, Any, int]]:
    """Yield key, node, and number of added arguments of each node with a target."""
    yield "model", with_classes(config.model, _CLASSES), 0
    yield "task", with_classes(config.task, _CLASSES), 0
    for split in ("train", "val", "test", "predict"):
        yield f"data.{split}", getattr(config.data, split), 0
    for stage in ("train", "eval", "device"):
        for name, node in with_classes(getattr(config.transforms, stage), _CLASSES).items():
            yield f"transforms.{stage}.{name}", node, 0
    for name in ("sampler", "batch_sampler", "collate_fn", "worker_init_fn"):
        yield f"loader.{name}", getattr(config.loader, name), 0
    for name, node in fill(config.callbacks, known.lengths).items():
        yield f"callbacks.{name}", node, 0
    optimizing = optimizer_nodes(fill(config.optimizer, known.lengths))
    if config.lr_scheduler:
        filled = fill(config.lr_scheduler, known.lengths)
        optimizing |= schedule_nodes(filled, "lr_scheduler")
    for key, node in optimizing.items():
        yield key, node, 1


def _turn_problems(config: Config, turns: Sequence[str]) -> Iterator[Problem]:
    several = config.optimizer.get("optimizers") or {SINGLE: config.optimizer}
    names = [name for name, node in several.items() if node]
    if turns and set(turns) != set(names):
        yield Problem(
            "optimizer.optimizers",
            f"the optimizers are {', '.join(names)}, but those of task.turns {', '.join(turns)}",
            hint="a task that takes turns has one optimizer for each, such as optimizer=gan",
        )


def _search_problems(config: Config, known: Known) -> Iterator[Problem]:
    """Find settings without effect on an optimizer that computes gradients itself."""
    nodes = optimizer_nodes(fill(config.optimizer, known.lengths))
    kinds = [locate(node["_target_"]) for node in nodes.values()]
    searching = [k.__name__ for k in kinds if isinstance(k, type) and takes_closure(k)]
    options = config.trainer
    for key in without_effect(options.precision, options) if searching else ():
        yield Problem(
            f"trainer.{key}",
            f"has no effect on the gradients that {searching[0]} computes itself",
            hint="leave it out, or take another optimizer",
        )


def _sharding_problems(config: Config) -> Iterator[Problem]:
    """Find nodes that need whole parameters, which no process has under fsdp."""
    if config.strategy.name != "fsdp":
        return
    for name, node in config.callbacks.items():
        if node and not getattr(locate(node["_target_"]), "takes_shards", True):
            message = f"{node['_target_']} needs whole parameters, and strategy=fsdp shards them"
            yield Problem(f"callbacks.{name}", message, hint="use strategy=ddp")
    for section in sections(config.optimizer, "optimizer", []):
        kind = locate(section.target["_target_"])
        if isinstance(kind, type) and issubclass(kind, UNSHARDED):
            yield Problem(
                f"{section.key}._target_",
                f"{kind.__name__} cannot train what strategy=fsdp shards",
                hint="strategy=ddp keeps parameters whole; most other optimizers train shards",
            )


def _hook_problems(config: Config) -> Iterator[Problem]:
    """Try the options of gradient compression, which torch sees once all processes have met."""
    if config.strategy.comm_hook == "powersgd":
        try:
            PowerSGDState(process_group=None, **config.strategy.comm_hook_options)
        except (TypeError, ValueError) as error:
            yield Problem("strategy.comm_hook_options", str(error))


def _sparse_problems(parts: Assembly) -> Iterator[Problem]:
    """Find parameters whose gradients are dense in optimizers that take sparse ones only."""
    sparse = {
        getattr(m, "weight", None) for m in parts.model.modules() if getattr(m, "sparse", False)
    }
    for name, optimizer in parts.optimizers.items():
        of = [p for group in optimizer.param_groups for p in group["params"]]
        dense = [parts.optimizers.names[p] for p in of if p not in sparse]
        if isinstance(optimizer, torch.optim.SparseAdam) and dense:
            message = f"SparseAdam takes sparse gradients, and that of {dense[0]} is dense"
            hint = "Embedding(sparse=True) makes them; other optimizers take both"
            yield Problem(f"{parts.optimizers.keys[name]}._target_", message, hint)


def _monitor_problems(config: Config, names: Sequence[str]) -> Iterator[Problem]:
    known = [f"{stage}/{name}" for stage in ("val", "train") for name in names]
    known.append("train/grad_norm")
    known += [epoch_metric(name) for name in known if name.startswith("train/")]
    for key, monitor in _monitors(config):
        follows = key.endswith("lr_scheduler.monitor") and str(monitor).startswith("val/")
        if follows and config.data.val is None and config.trainer.overfit_batches is None:
            message = f"{monitor!r} is never logged: data.val is null"
            yield Problem(key, message, hint="follow train/loss")
        if monitor not in (None, "auto", *known):
            message = f"{monitor!r} is none of {', '.join(known)}"
            yield Problem(key, message, did_you_mean(str(monitor), known))


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
