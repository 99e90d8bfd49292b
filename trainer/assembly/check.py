"""Find mistakes in targets and monitors before data are read or a device is used.

First names, arguments and monitors are checked. Then `Assembly` builds its parts as for a run, on
the meta device.
"""

import functools
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from itertools import chain
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from regimen.conf.errors import (
    ConfigError,
    Problem,
    collect_problems,
    did_you_mean,
    problems_at,
    raise_problems,
)
from regimen.conf.interpolation import is_related, leaves, open_attributes
from regimen.conf.other_words import our_key
from regimen.conf.schema import OWN_KEYS, Config, Named
from regimen.conf.schema_trainer import TrainerConfig
from regimen.trainer.assembly.data import build_transforms, data_problems, key_of
from regimen.trainer.assembly.parts import (
    OFFERED,
    Assembly,
    strategy_class,
    with_classes,
    with_counted_classes,
    wrong_class,
)
from regimen.trainer.callback import Average, Callback
from regimen.trainer.lr_schedulers.build import AUTO
from regimen.trainer.optimizers.optimizers import UNSHARDED, Optimizers, Section, sections
from regimen.trainer.optimizers.state import needs_closure
from regimen.trainer.state import monitored_names
from regimen.trainer.strategies.multi_process import MultiProcess
from regimen.trainer.strategies.strategy import Strategy, sparse_layers
from regimen.trainer.targets.allow_list import locate
from regimen.trainer.targets.instantiate import CheckedNode, instantiate, nodes_in
from regimen.trainer.task import Task, missing_step

# Placeholders for facts that are known only once the data are open.
_BATCHES = 100
_CLASSES = 10
_SECTIONS = ("model", "task", "optimizer", "lr_scheduler", "strategy")
# Keys with mistakes in spite of which the section is built: a task without its loss, and an
# optimizer without one of its arguments, still show what others need of them.
_HARMLESS = re.compile(r"task\.loss\b|optimizer\.(?!_target_|optimizers\b)\w+$")
# Keys of the nodes that a section itself asks for; others are arguments of a node.
_PARTS = re.compile(
    r"model|task|optimizer|strategy|data\.\w+|loader\.(eval\.)?\w+|callbacks\.[^.]+"
    r"|transforms\.\w+\.[^.]+"
    r"|(optimizer\.(.+\.)?)?lr_scheduler|.*\.(optimizers|schedulers)\.[^.]+"
)
# Parts that are built when the training set is open, and may ask for its attributes.
_ASKING = re.compile(
    r"(model|task|optimizer|lr_scheduler)(?=\.)|callbacks\.[^.]+|transforms\.device\.[^.]+"
    r"|loader\.(sampler|batch_sampler|collate_fn|worker_init_fn)"
)
# In nodes of optimizers and schedules: keys of ours, and arguments that we compute from theirs.
_CONVERTED = (*chain(*OWN_KEYS.values()), "milestones", "step_size", "max_lr")
# Losses of torch whose targets are class numbers, and those whose targets have the output's shape.
_CLASS_LOSSES = ("CrossEntropyLoss", "NLLLoss", "MultiMarginLoss")
_VALUE_LOSSES = (
    *("MSELoss", "L1Loss", "SmoothL1Loss", "HuberLoss", "SoftMarginLoss"),
    *("BCEWithLogitsLoss", "PoissonNLLLoss"),
)
_MONITOR = re.compile(r"((optimizer\.optimizers\.[^.]+\.)?lr_scheduler|callbacks\.[^.]+)\.monitor")


def check_targets(config: Config, wrong: Collection[str] = ()) -> None:
    """Raise ConfigError with all mistakes in the targets of a configuration.

    `wrong`: keys whose mistakes are reported already; nothing is reported about them. A part that
    needs a node with a mistake is not built.
    """
    problems = [*_compile_problems(config.trainer.compile), *_node_problems(config)]
    broken = {problem.key for problem in problems}
    # Parts that need a value of the open data are built, and checked as a whole, once it is there.
    for key in chain(*open_attributes(asdict(config)).values()):
        part = _ASKING.match(key)
        if part is not None:
            broken.add(part[0])
            continue
        problems.append(
            Problem(
                key,
                "asks for an attribute of data.train, which is not open when this is needed",
                "model, task, optimizer, lr_scheduler, callbacks, transforms.device and the nodes "
                "of loader may",
            )
        )
    for name in _SECTIONS:
        if getattr(config, name) == {}:
            broken.add(name)
    for problem in problems:
        name = problem.key.partition(".")[0]
        if name in _SECTIONS and not _HARMLESS.match(problem.key):
            broken.add(name)

    config = _without(config, broken)
    parts = placeholder_assembly(config)
    first = [*_task_problems(parts), *_strategy_problems(config)]
    # Further problems of the same keys would only follow from the first.
    reported = set()
    for problem in first:
        reported |= {problem.key, problem.key.rpartition(".")[0]}
    later = [*_loss_problems(config), *_part_problems(parts), *data_problems(config)]
    for problem in first + [problem for problem in later if problem.key not in reported]:
        if not is_related(problem.key, broken):
            problems.append(problem)
    raise_problems(problem for problem in problems if not is_related(problem.key, wrong))


def _without(config: Config, broken: Collection[str]) -> Config:
    """Return a configuration without the sections and named nodes that cannot be built."""
    optimizer = config.optimizer.items()
    values = dict[str, Any]()
    values["optimizer"] = {n: value for n, value in optimizer if f"optimizer.{n}" not in broken}
    for name in _SECTIONS:
        if name in broken:
            values[name] = None if name == "lr_scheduler" else {}
    values["callbacks"] = _sound_nodes(config.callbacks, "callbacks", broken)
    stages = {}
    for stage in ("train", "eval", "device"):
        nodes = getattr(config.transforms, stage)
        stages[stage] = _sound_nodes(nodes, f"transforms.{stage}", broken)
    return replace(config, **values, transforms=replace(config.transforms, **stages))


def _sound_nodes(nodes: Named, key: str, broken: Collection[str]) -> Named:
    return {n: None if is_related(f"{key}.{n}", broken) else node for n, node in nodes.items()}


def placeholder_assembly(config: Config) -> Assembly:
    """Return the parts of a run without data, device or storage."""
    counted = with_counted_classes(config, _CLASSES)
    return Assembly(counted, Strategy("meta"), _CLASSES, _BATCHES, guessed=True)


def _compile_problems(choice: bool | dict[str, Any]) -> Iterator[Problem]:
    """Check the compiler's backend; let the default one check its own options."""
    if not isinstance(choice, dict) or not (choice.get("backend") or choice.get("options")):
        return  # a check needs torch's compiler, which is slow to import
    backend = choice.get("backend", "inductor")
    available = torch.compiler.list_backends(())
    if backend not in available:
        yield Problem(
            "trainer.compile.backend",
            f"no backend {backend!r} is registered",
            f"there are {', '.join(available)}",
        )
    if backend != "inductor":
        return
    for name, value in (choice.get("options") or {}).items():
        try:
            torch.compile(nn.Identity(), options={name: value})
        except RuntimeError as error:
            message = str(error).partition(", known options")[0]
            yield Problem(f"trainer.compile.options.{name}", message)


def _node_problems(config: Config) -> Iterator[Problem]:
    """Check each node's arguments, and that a class target has the required base class."""
    # Named sets such as `data.val.NAME` are not covered by the pattern: only the schema tells them
    # from the arguments of one set.
    sets = [key_of(stage) for stage in (*config.data.validations, *config.data.tests)]
    for key, node in nodes_in(with_classes(asdict(config), _CLASSES)):
        section = key.partition(".")[0]
        is_part = key in sets or _PARTS.fullmatch(key) is not None
        is_partial = node.get("_partial_") is True
        if is_partial and section in OWN_KEYS:
            yield Problem(
                f"{key}._partial_",
                f"is not needed: {section} is built when the model's parameters are there",
                "leave it out",
            )
            continue
        checked = _checked(node, key, is_part)
        built = functools.partial if is_partial else checked.target
        # None: what could not be located is among the problems of its arguments.
        if key == "strategy" and built is not None and not isinstance(built, type):
            yield Problem("strategy._target_", "is a function, and a strategy is a class")
            continue
        if is_part and isinstance(built, type):
            reason = wrong_class(key, built)
            if reason is not None:
                yield Problem(f"{key}._target_", reason)
                continue
        yield from checked.problems


def _checked(node: dict[str, Any], key: str, is_part: bool) -> CheckedNode:
    """Check a node's arguments, given what a run adds to them when it calls the target."""
    section = key.partition(".")[0]
    provided: Sequence[str] = ()
    if re.fullmatch(r"loader\.\w*sampler", key):
        provided = OFFERED
    elif is_part and section == "data":
        provided = ("transform",)
    if not is_part or section not in OWN_KEYS:
        return CheckedNode(node, key, 0, provided, None, our_key)
    # An optimizer is called with the parameters, a schedule with its optimizer.
    if node.get("mode") == AUTO:  # follows from what a plateau schedule monitors
        node = {name: value for name, value in node.items() if name != "mode"}
    return CheckedNode(node, key, 1, provided, _CONVERTED, our_key)


def _loss_problems(config: Config) -> Iterator[Problem]:
    """Call torch's losses on two tiny samples: torch checks their arguments only when called."""
    for key, node in nodes_in(with_classes(config.task, _CLASSES).get("loss"), "task.loss"):
        module, _, name = node["_target_"].rpartition(".")
        if module != "torch.nn" or name not in (*_CLASS_LOSSES, *_VALUE_LOSSES):
            continue
        with suppress(ConfigError):  # of its constructor: reported with the task's
            loss = instantiate(node, _key_=key)
            classes = 3
            for weight in (getattr(loss, "pos_weight", None), getattr(loss, "weight", None)):
                if weight is not None and weight.ndim:
                    classes = len(weight)
            output = torch.zeros(2, classes)
            target = torch.zeros_like(output)
            if name in _CLASS_LOSSES:
                target = torch.zeros(2, dtype=torch.int64)
            try:
                loss(output, target)
            except (ValueError, RuntimeError) as error:
                yield Problem(key, f"{node['_target_']}: {error}")


def _task_problems(parts: Assembly) -> Iterator[Problem]:
    """Build the task and check what depends on it; a bare task replaces a broken one."""
    if not parts.config.task:
        vars(parts)["task"] = Task()  # where `cached_property` stores it
        return
    try:
        task = parts.task
    except ConfigError as error:
        task = _stand_in_task(parts)
        vars(parts)["task"] = task
        yield from error.problems
    if type(task) is not Task:
        step = "turn_step" if task.turns else "training_step"
        if getattr(type(task), step) is getattr(Task, step):
            yield Problem("task._target_", missing_step(type(task), step))
        yield from name_problems(task)
        yield from monitor_problems(parts.config, task)
    if task.fresh_batches and not task.turns:
        yield Problem("task.fresh_batches", "is true, and the task takes no turns", "leave it out")
    names = [section.name for section in _sections(parts.config)]
    if names and task.turns and set(task.turns) != set(names):
        yield Problem(
            "optimizer.optimizers",
            f"the optimizers are {', '.join(names)}, but those of task.turns "
            f"{', '.join(task.turns)}",
            "a task that takes turns has one optimizer for each, such as optimizer=gan",
        )


def _stand_in_task(parts: Assembly) -> Task:
    """Return the task of a configuration without its loss, or else a bare one."""
    plain = dict(parts.config.task)
    plain.pop("loss", None)
    with suppress(Exception):
        return replace(parts, config=replace(parts.config, task=plain)).task
    return Task()


def _sections(config: Config) -> Sequence[Section]:
    return sections(config.optimizer) if config.optimizer else []


def name_problems(task: Task) -> Iterator[Problem]:
    """Yield the names that two metrics of a task have, of which one would hide the other."""
    names = list(task.metric_names())
    for name in sorted(set(names)):
        if names.count(name) > 1:
            yield Problem(
                "task.metrics",
                f"two metrics of the task would be called {name!r}, as in val/{name}",
                "give that of task.metrics another name",
            )


def monitor_problems(config: Config, task: Task) -> Iterator[Problem]:
    """Yield the monitors that are no metric of a task; a class without a name yet may be any."""
    available = monitored_names(task.metric_names(), config.data.validations or ["val"])
    # Without a training set the mistakes are in the data, and what is validated is not known.
    validates = (
        config.data.val is not None
        or config.trainer.overfit_batches is not None
        or config.data.train is None
    )
    sections = {
        "lr_scheduler": config.lr_scheduler,
        "optimizer": config.optimizer,
        "callbacks": config.callbacks,
    }
    for key, value in leaves(sections):
        if not _MONITOR.fullmatch(key):
            continue
        monitor = str(value)
        if not validates and "lr_scheduler" in key and monitor.startswith("val/"):
            yield Problem(
                key, f"{value!r} is never logged: data.val is null", hint="follow train/loss"
            )
        if value not in (None, "auto", *available) and not _of_class(monitor, config, task):
            message = f"{value!r} is none of {', '.join(available)}"
            yield Problem(key, message, did_you_mean(monitor, available))


def _of_class(monitor: str, config: Config, task: Task) -> bool:
    """Return whether a monitor may be the metric of one class, whose name only the data show."""
    stage, _, metric = monitor.rpartition("/")
    if stage not in ("train", "val", *config.data.validations):
        return False
    for name, one in task.metrics().items():
        if not metric.startswith(f"{name}_") or not getattr(one, "open_keys", False):
            continue
        class_name = metric.removeprefix(f"{name}_")
        limit = config.data.num_classes
        # Names are often numbers, and these may begin with 1.
        return limit is None or not class_name.isdecimal() or int(class_name) <= limit
    return False


def _strategy_problems(config: Config) -> Iterator[Problem]:
    """Find what needs whole parameters, where the strategy shards them; and idle options."""
    strategy, arguments = strategy_class(config)
    options = config.trainer
    if strategy.starts_processes and not issubclass(strategy, MultiProcess):
        message = f"{strategy.__name__} starts processes"
        yield Problem("strategy._target_", message, "derive it from MultiProcess")
    yield from strategy.problems(**arguments)
    if strategy.shares_parameters:
        # A process that left an update out alone would train on what the others have applied.
        message = f"updates are left out by all processes, and those of {strategy.name} do not wait"
        if options.on_nonfinite == "skip":
            yield Problem("trainer.on_nonfinite", message, "set stop, or use strategy=ddp")
        if options.precision == "fp16":
            yield Problem("trainer.precision", message, "set bf16 or fp32, or use strategy=ddp")
    for name, node in config.callbacks.items():
        if not node:
            continue
        kind = locate(node["_target_"])
        if strategy.shards_parameters and not getattr(kind, "supports_sharding", True):
            yield Problem(
                f"callbacks.{name}",
                f"{node['_target_']} needs whole parameters, and strategy={strategy.name} shards "
                "them",
                "use strategy=ddp",
            )
        is_average = isinstance(kind, type) and issubclass(kind, Average)
        if strategy.shares_parameters and is_average:
            yield Problem(
                f"callbacks.{name}",
                "each process would copy its own average into the weights that all processes of "
                f"strategy={strategy.name} train",
                "leave it out, or use strategy=ddp",
            )
    for section in _sections(config):
        kind = locate(path) if (path := section.target.get("_target_")) else None
        if not isinstance(kind, type):
            continue
        if strategy.shards_parameters and issubclass(kind, UNSHARDED):
            message = f"{kind.__name__} cannot train what strategy={strategy.name} shards"
            hint = "strategy=ddp keeps parameters whole; most other optimizers train shards"
            yield Problem(f"{section.key}._target_", message, hint)
        if not needs_closure(kind):
            continue
        for key in options.idle_with_closure(options.precision):
            message = f"has no effect on the gradients that {kind.__name__} computes itself"
            yield Problem(f"trainer.{key}", message, "leave it out, or take another optimizer")


def _part_problems(parts: Assembly) -> list[Problem]:
    """Build the other parts that need no data, in a run's order; return their problems."""
    config = parts.config
    problems: list[Problem] = []
    callbacks: dict[str, Callback] = {}
    with collect_problems(problems):
        callbacks = parts.callbacks
    if type(parts.task) is not Task:  # a bare task only replaces one that could not be built
        for name, callback in callbacks.items():
            callback.name = name
            with collect_problems(problems):
                callback.check_task(parts.task, config.data.validations)
    for stage in ("train", "eval", "device"):
        with collect_problems(problems):
            build_transforms(config, stage, _CLASSES)
    if config.model:
        model = _meta_model(parts, problems)
        if model is not None:
            _check_with_model(parts, model, callbacks, problems)
    return problems


def _meta_model(parts: Assembly, problems: list[Problem]) -> nn.Module | None:
    """Build the model on the meta device, and add its problems; None if that is not possible."""
    try:
        with parts.strategy.device, _Unfilled():
            return parts.model
    except ConfigError as error:
        cause = error.__cause__
        if not (isinstance(cause, RuntimeError) and "meta" in str(cause).lower()):
            problems += error.problems
    except Exception:  # a network that cannot be on the meta device is not checked here
        return None
    return None


def _check_with_model(
    parts: Assembly,
    model: nn.Module,
    callbacks: Mapping[str, Callback],
    problems: list[Problem],
) -> None:
    """Build the parts that need the model, and add their problems."""
    config = parts.config
    with collect_problems(problems):
        _ = parts.checkpointed
    with collect_problems(problems):
        _ = parts.regions
    with collect_problems(problems):
        parts.task.check_evaluation(model, {})
    if config.optimizer:
        with collect_problems(problems):
            problems += sparse_problems(parts.optimizers, model, config.trainer)
            _ = parts.schedule
    with collect_problems(problems):  # after the optimizers, whose rules freeze parameters
        strategy, arguments = strategy_class(config)
        strategy.check_model(model, **arguments)
    for name, callback in callbacks.items():
        with collect_problems(problems), problems_at(f"callbacks.{name}"):
            callback.check(model)


def sparse_problems(
    optimizers: Optimizers, model: nn.Module, options: TrainerConfig
) -> Iterator[Problem]:
    """Find what does not go with sparse gradients, and what takes no others: the first of each."""
    sparse = sparse_layers(model)
    if sparse and options.gradient_noise is not None:
        layer = next(iter(sparse.values()))
        yield Problem(
            "trainer.gradient_noise",
            f"is added to all entries of a gradient, and that of {layer} is sparse",
            "leave it out, or build the embedding with sparse=False",
        )
    for name, optimizer in optimizers.optimizers.items():
        key = f"{optimizers.sections[name].key}._target_"
        kind = type(optimizer)
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        dense = [optimizers.names[p] for p in parameters if p not in sparse]
        if len(dense) < len(parameters) and _takes_dense_only(kind):
            first = next(optimizers.names[p] for p in parameters if p in sparse)
            yield Problem(
                key,
                f"{kind.__name__} takes no sparse gradients, and that of {first} is sparse",
                "give the embedding to torch.optim.SparseAdam (optimizer=several), or build it "
                "with sparse=False",
            )
        if dense and issubclass(kind, torch.optim.SparseAdam):
            yield Problem(
                key,
                f"SparseAdam takes sparse gradients, and that of {dense[0]} is dense",
                "Embedding(sparse=True) makes them",
            )


def _takes_dense_only(kind: type) -> bool:
    optim = torch.optim
    takes_sparse = (optim.SGD, optim.Adagrad, optim.SparseAdam, optim.LBFGS)
    return kind.__module__.startswith("torch.optim.") and not issubclass(kind, takes_sparse)


class _Unfilled(TorchFunctionMode):
    """Skip `normal_` on the meta device, where torch would import sympy for it."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Return the tensor as it is, or what any other function returns."""
        if func in (torch.Tensor.normal_, nn.init.normal_):
            tensor = args[0] if args else kwargs["tensor"]
            if tensor.is_meta:
                return tensor
        return func(*args, **(kwargs or {}))
