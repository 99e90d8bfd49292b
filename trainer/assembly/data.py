"""From a configuration to data sets: opened, numbered by class, cached, and described."""

import logging
import typing
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import asdict, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import torch

from regimen.conf.errors import ConfigError, Problem, raise_problems
from regimen.conf.interpolation import mapped, open_attributes
from regimen.conf.schema import Config, Node
from regimen.data.decode import fast_resize
from regimen.data.errors import ClassNamesError, DataError
from regimen.data.formats.detection_folder import DetectionFolder
from regimen.data.formats.huggingface import ArrowRows
from regimen.data.image_folder import ImageCache, ImageFolder, Pictures
from regimen.data.loading.device_transforms import batch_form, check_per_sample, defer
from regimen.data.loading.loader import is_cacheable, tensor_bytes
from regimen.data.mixture import Mixture, argument_errors
from regimen.data.orders import labels_of
from regimen.data.packing import PackedDocuments
from regimen.data.sources import TensorSamples, fingerprint
from regimen.data.streams import as_dataset
from regimen.data.tokenized import TokenizedSamples
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
    attributes: Mapping[str, Any] = MappingProxyType({})  # that are asked for: `data.train.NAME`

    def describe(self) -> list[dict[str, Any]]:
        """Return the facts about each set that the manifest shows."""
        return [_describe(split, one) for split, one in self.sets.items() if one is not None]


def _describe(split: str, dataset: Any) -> dict[str, Any]:
    names = names_of(dataset)
    facts = {
        "split": split,
        "type": type(dataset).__name__,
        "samples": len(dataset) if hasattr(dataset, "__len__") else None,
        "classes": None if names is None else len(names),
        "fingerprint": fingerprint(dataset),
    }
    if isinstance(dataset, Mixture):
        facts["epoch"] = dataset.explain()
    return facts


def nodes_of(config: Config, splits: Sequence[str] | None = None) -> dict[str, Any]:
    """Return the nodes of some splits, or of those that a run reads; None for a missing split."""
    nodes: dict[str, Any] = config.data.nodes()
    splits = splits or ["train", *nodes]
    nodes["predict"] = config.data.predict
    return {split: nodes.get(split) for split in splits}


def build_data(
    config: Config, splits: Sequence[str] | None = None, classes: Sequence[str] | None = None
) -> Data:
    """Open the data sets of some splits, or those of a run. Raises DataError and ConfigError.

    classes: the class names by number, of the run that the data are opened for; by default the
    training set's.
    """
    sets = dict[str, Any]()
    for split, node in nodes_of(config, splits).items():
        # Seeded by split: a data set draws the same numbers if it is opened alone, for an
        # evaluation, and the draws of others do not depend on it.
        with seeded(torch.device("cpu"), derived_seed(config.seed, "data", split)):
            sets[split] = _open(config, split, node) if node else None
            if classes:
                follow_names(sets[split], classes, key_of(split))
            else:
                of_train = names_of(sets.get("train"))
                follow_names(sets[split], of_train, key_of(split), "of data.train")
            _try_transforms(sets[split])
    if "train" in sets and sets["train"] is None:
        raise ConfigError("data.train", "is null: there is nothing to train on")
    num_classes = _num_classes(config, sets)
    if sets.get("train") is None:  # an evaluation
        return Data(sets, num_classes)
    return Data(sets, num_classes, _attributes(config, sets["train"]))


def _attributes(config: Config, dataset: Any) -> dict[str, Any]:
    """Return the attributes of the training set that the configuration asks for.

    Raises ConfigError for what it does not have as a plain value.
    """
    values = {}
    for full_name, keys in open_attributes(asdict(config)).items():
        name = full_name.rpartition(".")[2]
        try:
            values[full_name] = _plain(_attribute(dataset, name))
        except (AttributeError, TypeError) as error:
            offered = [f"${{data.train.{one}}}" for one in _offered(dataset)]
            raise ConfigError(
                keys[0],
                f"{type(dataset).__name__}, the training set, has no number, text or list of these "
                f"called {name!r}: {error}",
                f"it has {', '.join(offered) or 'none at all'}",
            ) from error
    return values


def _attribute(dataset: Any, name: str) -> Any:
    """Return an attribute of a data set, or of the one within it (as torch's Subset has one)."""
    while not hasattr(dataset, name) and hasattr(dataset, "dataset"):
        dataset = dataset.dataset
    return getattr(dataset, name)


def _plain(value: Any) -> Any:
    """Return a number, a text or a list of these, of Python's own types. Raises TypeError."""
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if getattr(value, "ndim", None) == 0:  # of numpy or torch, on the host
        value = value.item()
    if not isinstance(value, bool | int | float | str):
        raise TypeError(f"it is a {type(value).__name__}")
    return value


def _offered(dataset: Any) -> list[str]:
    """Return the names of the plain values that a data set has."""
    names = []
    for name in dir(dataset):
        if name.startswith("_"):
            continue
        with suppress(Exception):  # a property of the user's may fail
            _plain(getattr(dataset, name))
            names.append(name)
    return names


def open_data(
    config: Config,
    strategy: Strategy,
    splits: Sequence[str] | None = None,
    classes: Sequence[str] | None = None,
) -> Data:
    """Open the data sets, which may be downloaded, in one process of a machine at a time."""
    nodes = [node for node in nodes_of(config, splits).values() if node]
    # A class whose data sets may be opened by all processes at once says `concurrent = True`.
    at_once = all(getattr(locate(node["_target_"]), "concurrent", False) for node in nodes)
    # Collective: the processes of a machine wait for each other, each in its turn.
    with nullcontext() if at_once else strategy.group.one_per_node():
        return build_data(config, splits, classes)


def names_of(dataset: Any) -> list[str] | None:
    """Return the names of a data set's classes, by number; None if it has no names."""
    names = getattr(dataset, "classes", None)
    return list(map(str, names)) if names else None


def class_names(sets: Mapping[str, Any]) -> list[str] | None:
    """Return the names of the classes of the first data set that has some."""
    return next(filter(None, map(names_of, sets.values())), None)


def follow_names(
    dataset: Any,
    classes: Sequence[str] | None,
    key: str,
    whose: str = "that the run was trained on",
) -> None:
    """Number a data set's classes as `classes` does; `whose` they are, for the message.

    Raises ClassNamesError if it has other names, or if its labels cannot be renumbered.
    """
    names = names_of(dataset)
    if names is None or classes is None or names == [*classes]:
        return
    targets = getattr(dataset, "targets", None)
    has_class_numbers = isinstance(targets, torch.Tensor) and targets.ndim == 1
    is_ours = isinstance(dataset, Pictures | TensorSamples | ArrowRows)
    can_renumber = (is_ours and has_class_numbers) or isinstance(dataset, TokenizedSamples)
    if not can_renumber and names == [*classes[: len(names)]]:
        return  # the numbers agree

    unknown = [name for name in names if name not in classes]
    if unknown or not can_renumber:
        wrong = f"{_quoted(unknown)} among them" if unknown else "in another order"
        raise ClassNamesError(
            f"{key}: its classes are not those {whose}, {wrong}: it has "
            f"{len(names)} ({_quoted(names)}), the run {len(classes)} ({_quoted(classes)}): with "
            "other names their numbers would mean something else; give them the names of the run"
        )
    if isinstance(dataset, TokenizedSamples):
        dataset.renumber(classes)
        return
    numbers = torch.tensor([classes.index(name) for name in names])
    if isinstance(dataset, ArrowRows):
        # The numbers are on the host: nothing waits.
        dataset.renumber(numbers.tolist())
    dataset.targets = numbers[targets]
    dataset.classes = [*classes]


def _quoted(names: Sequence[str]) -> str:
    return ", ".join(map(repr, names[:5]))


def _try_transforms(dataset: Any) -> None:
    """Transform one image in memory before the run starts: a crop may be larger than the image."""
    input_form = getattr(dataset, "input_form", None)
    if not callable(input_form) or not input_form().get("size") or not len(dataset):
        return
    stand_in = getattr(dataset, "stand_in", None)  # reads no file, which may be broken
    try:
        if callable(stand_in):
            stand_in()
        else:
            dataset[0]
    except DataError as error:
        if isinstance(error.__cause__, ValueError):
            raise ConfigError("", str(error)) from error
        raise


def build_pipeline(config: Config, stage: str) -> Pipeline:
    """Build the transforms of `train` or `eval` samples."""
    steps = build_transforms(config, stage, config.data.num_classes)
    quick = {}
    for name, step in steps.items():
        if step is not None:
            quick[name] = fast_resize(step)
    return Pipeline(quick, f"transforms.{stage}")


def build_transforms(config: Config, stage: str, num_classes: int | None) -> dict[str, Any]:
    """Build the transforms of a stage (train, eval, device) by name; None where it is null."""
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
    accepted = parameters_of(node["_target_"]) or {}
    takes_pipeline = "transform" in accepted and "transform" not in node
    arguments: Node = {}
    if takes_pipeline:
        arguments["transform"] = pipeline
    is_evaluated = split != "train" or config.trainer.overfit_batches is not None
    if is_evaluated and config.task.get("generate") and "prompts" in accepted:
        arguments["prompts"] = True  # which the task answers
    if config.dry_run and "keep_index" in accepted:
        arguments["keep_index"] = False  # a dry run writes no files
    dataset = instantiate(_in_folds(config, split, node), _key_=key_of(split), **arguments)
    if dataset is None:
        return None
    if isinstance(dataset, DetectionFolder):
        raise_problems(_box_problems(config, stage))
    if takes_pipeline:
        _defer(config, split, dataset, pipeline)
    check_per_sample(pipeline, f"transforms.{stage}")
    set_cache(config, split, dataset)
    if config.data.decode == "scaled":
        if isinstance(dataset, ImageFolder) and pipeline.takes_files:
            dataset.scaled = True
        else:
            logger.warning(
                "warning: data.decode=scaled: data.%s has no files whose first transform is a "
                "bilinear RandomResizedCrop or Resize",
                split,
            )
    return as_dataset(dataset)


def _box_problems(config: Config, stage: str) -> Iterator[Problem]:
    """Yield transforms that cannot move the boxes of an image with it."""
    hint = "steps of torchvision.transforms.v2 move both, as those of transforms=detection"
    for name, node in getattr(config.transforms, stage).items():
        key = f"transforms.{stage}.{name}"
        if node and node["_target_"].startswith("regimen.data."):
            yield Problem(key, "takes an image alone, and is given one with its boxes", hint)
    for name, node in config.transforms.device.items():
        key = f"transforms.device.{name}"
        if node and getattr(_class_of(node["_target_"]), "moves_pixels", False):
            yield Problem(key, "moves the image and not its boxes", hint)


def _defer(config: Config, split: str, dataset: Any, pipeline: Pipeline) -> None:
    """Leave the last transforms to the loader, which applies them to whole batches, if it can.

    The data set (or its class) has to declare that its samples begin with what the transforms
    return.
    """
    if getattr(dataset, "transforms_in_batches", False) and _own_collate(config, split) is None:
        defer(pipeline, _stage_of(split))


def _own_collate(config: Config, split: str) -> str | None:
    """Return the key of the `collate_fn` of a split; None without one."""
    options = config.loader
    if split != "train" and options.eval.collate_fn:
        return "loader.eval.collate_fn"
    return "loader.collate_fn" if options.collate_fn else None


def _num_classes(config: Config, sets: dict[str, Any]) -> int | None:
    declared = config.data.num_classes
    if declared is None:
        return _counted(sets)
    for split, dataset in sets.items():
        labels = labels_of(dataset)
        if labels is None or not len(labels):
            continue
        low = int(labels.min())
        high = int(labels.max())
        if low < 0 or high >= declared:
            raise ConfigError(
                "data.num_classes",
                f"is {declared}, but the labels of data.{split} go from {low} to {high}",
                "labels count from 0" if low < 0 else f"set data.num_classes={high + 1}",
            )
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
    names = names_of(first)
    if names is not None:
        return len(names)
    if isinstance(first, PackedDocuments):
        return first.num_classes
    labels = labels_of(first)
    if labels is None or labels.dtype.kind not in "iu" or not len(labels):
        return None
    return int(labels.max()) + 1


def _in_folds(config: Config, split: str, node: Node) -> Any:
    """Return a data set's node in which each target that takes folds is given those of the run."""
    if config.data.folds is None or split.partition("/")[0] == "test":
        return node  # test sets are never cut
    folds = {"fold": config.data.fold, "folds": config.data.folds}

    def with_folds(part: Any) -> Any:
        if not isinstance(part, dict) or not part.get("_target_"):
            return part
        accepted = parameters_of(part["_target_"]) or {}
        return {**folds, **part} if folds.keys() <= accepted.keys() else part

    return mapped(node, with_folds)


def _fold_problems(config: Config) -> Iterator[Problem]:
    """Yield the data sets that cannot be cut into the folds that are asked for."""
    if config.data.folds is None:
        return
    nodes = config.data.nodes()
    for split in ("train", *(config.data.validations or ["val"])):
        node = nodes.get(split)
        if node is None:
            yield Problem(
                "data.folds", f"data.{split} is null: folds are shared out over train and val"
            )
        elif _in_folds(config, split, node) == node:
            yield Problem(
                "data.folds",
                f"data.{split}: {node['_target_']} has no folds",
                "a data set has, whose target takes `fold` and `folds` "
                "(regimen.data.splits.fold_of)",
            )


def _mixture_problems(config: Config) -> Iterator[Problem]:
    """Yield wrong sets and weights of mixtures, and samplers that would choose samples as well."""
    for split, node in config.data.nodes().items():
        cls = _class_of(node["_target_"])
        if cls is None or not issubclass(cls, Mixture):
            continue
        for argument, wrong in argument_errors(node.get("sets") or {}, node.get("weights") or {}):
            yield Problem(f"{key_of(split)}.{argument}", wrong)
        if split != "train":
            continue
        for name in ("sampler", "batch_sampler"):
            if getattr(config.loader, name) is not None:
                yield Problem(
                    f"loader.{name}",
                    "chooses samples, and so does data.train, a mixture",
                    "leave it out: weights say the shares",
                )


def set_cache(config: Config, split: str, dataset: Any) -> None:
    """Let a data set cache its decoded images. Raises ConfigError where a device cannot."""
    options = config.data
    if options.cache == "device" and split != "predict":
        transform = getattr(dataset, "transform", None)
        raise_problems(_device_cache_problems(config, split, type(dataset), transform))
    if options.cache == "none" or config.dry_run:
        return
    if isinstance(dataset, ImageFolder):
        folder = Path(options.cache_dir or Path(options.root or ".") / ".cache").expanduser()
        dataset.cache = ImageCache(options.cache, folder, options.cache_bytes)
    elif options.cache != "device":
        logger.info("data.cache: data.%s reads no image files: nothing to cache", split)


def device_cache_bytes(config: Config, sets: Mapping[str, Any]) -> int | None:
    """Return the bytes of a device's memory that the data sets take; None before it is known."""
    if config.data.cache != "device":
        return 0
    total = 0
    for dataset in sets.values():
        if dataset is None:
            continue
        batch = dataset.tensors()
        if batch is None:
            return None
        size = tensor_bytes(batch)
        if size <= config.data.cache_bytes:
            total += size
    return total


def data_problems(config: Config) -> Iterator[Problem]:
    """Yield what is wrong with the data sets, as far as it shows before they are open."""
    yield from _fold_problems(config)
    yield from _mixture_problems(config)
    if config.data.cache == "device":
        yield from _cache_problems(config)


def _cache_problems(config: Config) -> Iterable[Problem]:
    """Return what `data.cache=device` cannot cache: one problem for each key."""
    problems: dict[str, Problem] = {}
    for split, node in config.data.nodes().items():
        cls = _class_of(node["_target_"])
        if cls is None:
            continue
        pipeline = None
        if "transform" in (parameters_of(cls) or {}):
            with suppress(ConfigError):  # mistakes in transforms are reported as such
                pipeline = build_pipeline(config, _stage_of(split))
                _defer(config, split, cls, pipeline)
        for problem in _device_cache_problems(config, split, cls, pipeline):
            problems[problem.key] = problem
    return problems.values()


def _class_of(path: str) -> type | None:
    """Return the class of what a target builds; None if it does not show.

    It is the target itself, or for a function the class of its return annotation that a device can
    cache.
    """
    # Mistakes in targets are reported with their arguments. An annotation may use names that only
    # a type checker imports.
    with suppress(Exception):
        target = locate(path)
        if isinstance(target, type):
            return target
        returned = typing.get_type_hints(target).get("return")
        for member in typing.get_args(returned) or (returned,):
            if isinstance(member, type) and is_cacheable(member):
                return member
    return None


def _device_cache_problems(
    config: Config, split: str, cls: type, transform: Any
) -> Iterator[Problem]:
    """Yield why samples of a data set of class `cls` cannot be cached on a device."""
    way_out = f"set data.cache={'ram' if issubclass(cls, ImageFolder) else 'none'}"
    is_pipeline = isinstance(transform, Pipeline)
    if not is_cacheable(cls) or not (is_pipeline or transform is None):
        yield Problem(
            "data.cache",
            f"is device, but data.{split} ({cls.__name__}) cannot be kept there",
            f"{way_out}, or give it a method tensors() that returns all samples, and the group "
            "transforms",
        )
    else:
        collate_key = _own_collate(config, split)
        if collate_key is not None:
            yield Problem(
                collate_key,
                "puts single samples together, and data.cache=device gathers whole batches",
                f"leave it out, or {way_out}",
            )
    steps = transform.steps if is_pipeline else {}
    per_sample = [name for name, step in steps.items() if batch_form(step) is None]
    # Only the per-sample steps are reported: batched steps before them are fine once those are
    # gone. Without such steps the data set cannot leave any of its steps to the loader.
    for name in per_sample or steps:
        step = getattr(steps[name], "step", steps[name])  # a quick form stands for the step
        yield Problem(
            f"transforms.{_stage_of(split)}.{name}",
            f"{type(step).__name__} takes single samples; data.cache=device gathers whole batches",
            f"use a step for batches, as transforms=on_device does, or {way_out}",
        )


def data_facts(sets: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a checkpoint stores about data sets: class names, and statistics, if any."""
    facts: dict[str, Any] = {}
    names = class_names(sets)
    if names:
        facts["classes"] = names
    encoded = {}
    for split, dataset in sets.items():
        if callable(getattr(dataset, "statistics", None)):
            encoded[split] = dataset
    if encoded:
        first = encoded.get("train", next(iter(encoded.values())))
        facts["statistics"] = first.statistics()
        facts["fingerprints"] = {split: fingerprint(one) for split, one in encoded.items()}
    return facts


def nodes_with_statistics(config: Config) -> dict[str, Any]:
    """Return, by split, the nodes whose targets can be given statistics."""
    found = {}
    for split, node in config.data.nodes().items():
        if "statistics" in (parameters_of(node["_target_"]) or {}):
            found[split] = node
    return found


def with_statistics(config: Config, payload: Mapping[str, Any] | None) -> Config:
    """Return a configuration whose data sets are encoded by the statistics of a checkpoint."""
    state = {} if payload is None else payload["state"]
    statistics = state.get("data", {}).get("statistics")
    if not statistics:
        return config
    data = asdict(config.data)
    for split, node in nodes_with_statistics(config).items():
        section, _, name = split.partition("/")
        encoded = {"statistics": statistics, **node}
        if name:  # one of several sets: data.val.NAME
            data[section][name] = encoded
        else:
            data[section] = encoded
    return replace(config, data=replace(config.data, **data))


def changed_data(then: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Return a remark on the data sets that changed since a checkpoint was saved, if any did.

    `then`, `now`: the facts that a checkpoint stores about the data.
    """
    before = then.get("fingerprints", {})
    after = now.get("fingerprints", {})
    changed = []
    for split, mark in after.items():
        if before.get(split, mark) != mark:
            changed.append(f"data.{split}")
    if not changed:
        return []
    is_same = then.get("statistics") == now.get("statistics")
    how = "the same statistics as before" if is_same else "other statistics than before"
    return [
        f"{', '.join(changed)}: the rows are not those of the checkpoint; they are encoded by {how}"
    ]
