"""From a configuration to data sets and loaders, what is kept of the data, and their facts."""

import logging
import typing
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import asdict, replace
from itertools import filterfalse
from pathlib import Path
from typing import Any, NamedTuple

import torch

from regimen.conf.errors import ConfigError, Problem, raise_problems
from regimen.conf.interpolation import mapped
from regimen.conf.schema import Config, Node
from regimen.data.decode import quick_form
from regimen.data.errors import ClassNamesError, DataError
from regimen.data.formats.huggingface import ArrowRows
from regimen.data.image_folder import ImageCache, ImageFolder, Pictures
from regimen.data.loading.device_transforms import batch_form, check_per_sample, defer
from regimen.data.loading.loader import bytes_of, can_be_kept
from regimen.data.mixture import Mixture, faults
from regimen.data.orders import labels_of
from regimen.data.sources import TensorSamples, fingerprint
from regimen.data.streams import as_dataset
from regimen.data.transforms import Pipeline
from regimen.trainer.assembly.parts import build_named, with_classes
from regimen.trainer.rng import derived_seed, seeded
from regimen.trainer.strategies.strategy import Strategy
from regimen.trainer.targets.allow_list import locate
from regimen.trainer.targets.instantiate import instantiate, parameters_of

logger = logging.getLogger("regimen")


class Data(NamedTuple):
    """The data sets of a run; `train` is None for an evaluation."""

    sets: dict[str, Any]
    num_classes: int | None

    def describe(self) -> list[dict[str, Any]]:
        """Return the facts about each set that the manifest shows."""
        return [
            {
                "split": split,
                "type": type(dataset).__name__,
                "samples": len(dataset) if hasattr(dataset, "__len__") else None,
                "classes": _number_of_classes(dataset),
                "fingerprint": fingerprint(dataset),
                **({"epoch": dataset.explain()} if isinstance(dataset, Mixture) else {}),
            }
            for split, dataset in self.sets.items()
            if dataset is not None
        ]


def _number_of_classes(dataset: Any) -> int | None:
    named = getattr(dataset, "classes", None)
    return None if named is None else len(named) or None


def nodes_of(config: Config, splits: Sequence[str] | None = None) -> dict[str, Any]:
    """Return the nodes of some splits, None for what is not there; or those that a run reads."""
    known = config.data.nodes() | {"predict": config.data.predict}
    return {split: known.get(split) for split in splits or ["train", *config.data.nodes()]}


def build_data(
    config: Config, splits: Sequence[str] | None = None, classes: Sequence[str] | None = None
) -> Data:
    """Open the data sets: some, or those of a run. Raises DataError and ConfigError.

    classes: the names of a run that they are opened for again, which give the numbers; in a
    training those of its training set do.
    """
    sets = dict[str, Any]()
    for split, node in nodes_of(config, splits).items():
        # Whatever a data set draws here, it draws in an evaluation of it alone, and moves no other.
        with seeded(torch.device("cpu"), derived_seed(config.seed, "data", split)):
            sets[split] = _open(config, split, node) if node else None
            follow_names(sets[split], classes or names_of(sets.get("train")), key_of(split))
            _try_transforms(sets[split])
    if "train" in sets and sets["train"] is None:
        raise ConfigError("data.train", "is null: there is nothing to train on")
    return Data(sets, _num_classes(config, sets))


def open_data(
    config: Config,
    strategy: Strategy,
    splits: Sequence[str] | None = None,
    classes: Sequence[str] | None = None,
) -> Data:
    """Open the data sets, which may be downloaded, in one process of a machine at a time."""
    nodes = [node for node in nodes_of(config, splits).values() if node]
    # `concurrent = True` on a class opts out.
    at_once = all(getattr(locate(node["_target_"]), "concurrent", False) for node in nodes)
    with nullcontext() if at_once else strategy.group.one_per_node():
        return build_data(config, splits, classes)


def names_of(dataset: Any) -> list[str] | None:
    """Return the names of a data set's classes, by number; None of one without names."""
    names = getattr(dataset, "classes", None)
    return list(map(str, names)) if names else None


def class_names(sets: Mapping[str, Any]) -> list[str] | None:
    """Return the names of the classes of the first data set that has some."""
    return next(filter(None, map(names_of, sets.values())), None)


def follow_names(dataset: Any, classes: Sequence[str] | None, key: str) -> None:
    """Number a data set's classes as a run does, whose names are given. Raises ClassNamesError."""
    own = names_of(dataset)
    if own is None or classes is None or own == [*classes]:
        return
    targets = getattr(dataset, "targets", None)
    of_ours = isinstance(dataset, Pictures | TensorSamples | ArrowRows)
    by_sample = isinstance(targets, torch.Tensor) and targets.ndim == 1
    if not (of_ours and by_sample) and own == [*classes[: len(own)]]:
        return  # the numbers agree
    if not {*own} <= {*classes} or not of_ours or not by_sample:
        unknown = list(filterfalse(classes.__contains__, own))
        wrong = f"{', '.join(map(repr, unknown[:5]))} among them" if unknown else "in another order"
        shown = ", ".join(map(repr, own[:5]))
        of_run = ", ".join(map(repr, classes[:5]))
        raise ClassNamesError(
            f"{key}: its classes are not those that the run was trained on, {wrong}: it has "
            f"{len(own)} ({shown}), the run {len(classes)} ({of_run}): with other names their "
            "numbers would mean something else; give them the names of the run"
        )
    numbers = torch.tensor(list(map(classes.index, own)))
    if isinstance(dataset, ArrowRows):
        dataset.renumber(numbers.tolist())
    dataset.targets = numbers[targets]
    dataset.classes = [*classes]


def _try_transforms(dataset: Any) -> None:
    # An image in memory meets its transforms before the run: a crop may be larger than it.
    told = getattr(dataset, "input_form", None)
    if callable(told) and told().get("size") and len(dataset):
        try:
            own = getattr(dataset, "stand_in", None)  # reads no file, which may be broken
            own() if callable(own) else dataset[0]
        except DataError as error:
            if isinstance(error.__cause__, ValueError):
                raise ConfigError("", str(error)) from error
            raise


def build_pipeline(config: Config, stage: str) -> Pipeline:
    """Build the transforms of `train` or `eval` samples."""
    steps = build_transforms(config, stage, config.data.num_classes)
    quick = {name: quick_form(step) for name, step in steps.items() if step is not None}
    return Pipeline(quick, f"transforms.{stage}")


def build_transforms(config: Config, stage: str, num_classes: int | None) -> dict[str, Any]:
    """Build the transforms of a stage (train, eval, device) by name; null drops one."""
    nodes = with_classes(getattr(config.transforms, stage), num_classes)
    return build_named(nodes, f"transforms.{stage}")


def key_of(split: str) -> str:
    """Return the key of a data set: `data.val.NAME` of one of several validation sets."""
    return f"data.{split.replace('/', '.')}"


def _stage_of(split: str) -> str:
    return "train" if split == "train" else "eval"


def _open(config: Config, split: str, node: Node) -> Any:
    """Open a data set and give it its transforms."""
    stage = _stage_of(split)
    pipeline = build_pipeline(config, stage)
    # A data set of the user's own may have no parameter for transforms.
    taken = parameters_of(node["_target_"]) or {}
    transformed = "transform" in taken and "transform" not in node
    given: Node = {"transform": pipeline} if transformed else {}
    if config.dry_run and "keep_index" in taken:
        given["keep_index"] = False  # a dry run leaves nothing behind
    dataset = instantiate(_in_folds(config, split, node), _key_=key_of(split), **given)
    if dataset is None:
        return None
    if transformed:
        _defer(config, split, dataset, pipeline)
    check_per_sample(pipeline, f"transforms.{stage}")
    set_cache(config, split, dataset)
    if config.data.decode == "scaled":
        if isinstance(dataset, ImageFolder) and pipeline.takes_files:
            dataset.scaled = True
        else:
            known = "files whose first transform is a bilinear RandomResizedCrop or Resize"
            logger.warning("warning: data.decode=scaled: data.%s has no %s", split, known)
    return as_dataset(dataset)


def _defer(config: Config, split: str, dataset: Any, pipeline: Pipeline) -> None:
    """Leave the last transforms to the loader, which applies them to whole batches, if it can.

    The data set (or its class) has to declare that its samples begin with what the transforms
    return.
    """
    if getattr(dataset, "transforms_in_batches", False) and _own_collate(config, split) is None:
        defer(pipeline, _stage_of(split))


def _own_collate(config: Config, split: str) -> str | None:
    """Return the key of the `collate_fn` that a split has; None without one."""
    options = config.loader
    if split != "train" and options.eval.collate_fn:
        return "loader.eval.collate_fn"
    return "loader.collate_fn" if options.collate_fn else None


def _num_classes(config: Config, sets: dict[str, Any]) -> int | None:
    declared = config.data.num_classes
    if declared is None:
        return _counted(sets)
    for split, dataset in sets.items():
        if (labels := labels_of(dataset)) is None or not len(labels):
            continue
        low, high = int(labels.min()), int(labels.max())
        if low < 0 or high >= declared:
            message = f"is {declared}, but the labels of data.{split} go from {low} to {high}"
            hint = f"set data.num_classes={high + 1}" if low >= 0 else "labels count from 0"
            raise ConfigError("data.num_classes", message, hint)
    names = names_of(sets.get("train"))
    if names is not None and len(names) != declared:
        raise ConfigError(
            "data.num_classes",
            f"is {declared}, but data.train has {len(names)} classes: {', '.join(names[:10])}",
            "set data.num_classes=null, and they are counted; model.num_classes=... alone sets the "
            "number of outputs",
        )
    return declared


def _counted(sets: dict[str, Any]) -> int | None:
    """Return how many classes the first data set has: by their names, or the highest label."""
    first = next((dataset for dataset in sets.values() if dataset is not None), None)
    if (names := names_of(first)) is not None:
        return len(names)
    labels = labels_of(first)
    if labels is None or labels.dtype.kind not in "iu" or not len(labels):
        return None
    return int(labels.max()) + 1


def _in_folds(config: Config, split: str, node: Node) -> Any:
    """Return a data set's node, in which every target that takes folds is given them."""
    given = {"fold": config.data.fold, "folds": config.data.folds}

    def shared(part: Any) -> Any:
        target = part.get("_target_") if isinstance(part, dict) else None
        taken = (parameters_of(target) or {}).keys() if target else ()
        return {**given, **part} if {*taken} >= given.keys() else part

    # Test sets stay as they are.
    cut = config.data.folds is not None and split.partition("/")[0] != "test"
    return mapped(node, shared) if cut else node


def _fold_problems(config: Config) -> Iterator[Problem]:
    """Name the data sets that cannot be shared out, where folds are asked for."""
    if config.data.folds is None:
        return
    nodes = config.data.nodes()
    for split in ("train", *(config.data.validations or ["val"])):
        if (node := nodes.get(split)) is None:
            message = f"data.{split} is null: folds are shared out over train and val"
            yield Problem("data.folds", message)
        elif _in_folds(config, split, node) == node:
            hint = (
                "a data set has, whose target takes `fold` and `folds` "
                "(regimen.data.splits.fold_of)"
            )
            yield Problem("data.folds", f"data.{split}: {node['_target_']} has no folds", hint)


def _mixture_problems(config: Config) -> Iterator[Problem]:
    """Name what is wrong with the sets and weights of mixtures, and samplers beside their order."""
    for split, node in config.data.nodes().items():
        if not issubclass(_kind(node["_target_"]) or object, Mixture):
            continue
        for argument, wrong in faults(node.get("sets") or {}, node.get("weights") or {}):
            yield Problem(f"{key_of(split)}.{argument}", wrong)
        for key in ("sampler", "batch_sampler") if split == "train" else ():
            if getattr(config.loader, key) is not None:
                message = "chooses samples, and so does data.train, a mixture"
                yield Problem(f"loader.{key}", message, "leave it out: weights say the shares")


def set_cache(config: Config, split: str, dataset: Any) -> None:
    """Let a data set keep its decoded images. Raises ConfigError where a device cannot."""
    options = config.data
    if options.cache == "device" and split != "predict":
        raise_problems(_not_kept(config, split, type(dataset), getattr(dataset, "transform", None)))
    if options.cache == "none" or config.dry_run:
        return
    if isinstance(dataset, ImageFolder):
        folder = Path(options.cache_dir or Path(options.root or ".") / ".cache").expanduser()
        dataset.cache = ImageCache(options.cache, folder, options.cache_bytes)
    elif options.cache != "device":
        logger.info("data.cache: data.%s reads no image files: nothing to cache", split)


def kept_bytes(config: Config, sets: Mapping[str, Any]) -> int | None:
    """Return how much of a device's memory the data sets will take; None before it is known."""
    if config.data.cache != "device":
        return 0
    batches = [dataset.tensors() for dataset in sets.values() if dataset is not None]
    if any(batch is None for batch in batches):
        return None
    return sum(size for size in map(bytes_of, batches) if size <= config.data.cache_bytes)


def data_problems(config: Config) -> Iterator[Problem]:
    """Yield what is wrong with the data sets, as far as it shows before they are open."""
    yield from _fold_problems(config)
    yield from _mixture_problems(config)
    yield from _cache_problems(config)


def _cache_problems(config: Config) -> Iterable[Problem]:
    """Return what `data.cache=device` cannot keep."""
    found: dict[str, Problem] = {}
    for split, node in config.data.nodes().items() if config.data.cache == "device" else ():
        if (kind := _kind(node["_target_"])) is None:
            continue
        pipeline = None
        if "transform" in (parameters_of(kind) or {}):
            with suppress(ConfigError):  # of the transforms: reported as such
                pipeline = build_pipeline(config, _stage_of(split))
                _defer(config, split, kind, pipeline)
        found |= {problem.key: problem for problem in _not_kept(config, split, kind, pipeline)}
    return found.values()


def _kind(path: str) -> type | None:
    """Return the class of a target, or the one to be kept that a function says it returns."""
    with suppress(Exception):  # reported with its arguments; names that only a type checker knows
        if isinstance(target := locate(path), type):
            return target
        returned = typing.get_type_hints(target).get("return")
        members = typing.get_args(returned) or (returned,)
        return next((k for k in members if isinstance(k, type) and can_be_kept(k)), None)
    return None


def _not_kept(config: Config, split: str, kind: type, transform: Any) -> Iterator[Problem]:
    instead = f"set data.cache={'ram' if issubclass(kind, ImageFolder) else 'none'}"
    steps = transform.steps if isinstance(transform, Pipeline) else {}
    if not can_be_kept(kind) or (transform is not None and not isinstance(transform, Pipeline)):
        message = f"is device, but data.{split} ({kind.__name__}) cannot be kept there"
        more = "or give it a method tensors() that returns all samples, and the group transforms"
        yield Problem("data.cache", message, f"{instead}, {more}")
    elif (key := _own_collate(config, split)) is not None:
        message = "puts single samples together, and data.cache=device gathers whole batches"
        yield Problem(key, message, f"leave it out, or {instead}")
    # Those before a step for single samples could do without.
    for name in [name for name, step in steps.items() if batch_form(step) is None] or steps:
        written = type(getattr(steps[name], "step", steps[name]))  # which a quick form stands for
        message = (
            f"{written.__name__} takes single samples; data.cache=device gathers whole batches"
        )
        hint = f"use a step for batches, as transforms=on_device does, or {instead}"
        yield Problem(f"transforms.{_stage_of(split)}.{name}", message, hint)


def data_facts(sets: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a checkpoint keeps of data sets: names of classes, and statistics, if any."""
    names = class_names(sets)
    facts: dict[str, Any] = {"classes": names} if names else {}
    known = {split: s for split, s in sets.items() if callable(getattr(s, "statistics", None))}
    if not known:
        return facts
    first = known.get("train", next(iter(known.values())))
    fingerprints = {split: fingerprint(dataset) for split, dataset in known.items()}
    return {**facts, "statistics": first.statistics(), "fingerprints": fingerprints}


def statistical(config: Config) -> dict[str, Any]:
    """Return, by split, the nodes whose targets can be given statistics."""
    nodes = config.data.nodes()
    return {s: n for s, n in nodes.items() if "statistics" in (parameters_of(n["_target_"]) or ())}


def with_statistics(config: Config, payload: Mapping[str, Any] | None) -> Config:
    """Return a configuration whose data sets are encoded by the statistics of a checkpoint."""
    state = {} if payload is None else payload["state"]
    if not (kept := state.get("data", {}).get("statistics")):
        return config
    data = asdict(config.data)
    for split, node in statistical(config).items():
        place, _, name = split.partition("/")
        (data[place] if name else data)[name or place] = {"statistics": kept, **node}
    return replace(config, data=replace(config.data, **data))


def changed_data(then: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Say which data sets are no longer those of a checkpoint."""
    before = then.get("fingerprints", {})
    changed = [s for s, mark in now.get("fingerprints", {}).items() if before.get(s, mark) != mark]
    if not changed:
        return []
    same = then.get("statistics") == now.get("statistics")
    how = "the same statistics as before" if same else "other statistics than before"
    names = ", ".join(f"data.{split}" for split in changed)
    return [f"{names}: the rows are not those of the checkpoint; they are encoded by {how}"]
