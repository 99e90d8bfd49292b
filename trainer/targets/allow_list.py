"""The allow list of `_target_`: what it may name, and how the class or function is found.

A configuration may come from anyone. It can name only
- what this file offers of the libraries and of Regimen,
- what lies in packages of the folder where the program was started,
- what `--allow-target` allows on the command line. No YAML can extend the list.

A library's module that is not listed offers nothing; a listed one offers the kinds of objects that
are listed for it. A module of Regimen offers something if a shipped YAML (`conf/`) names something
in it: its public classes if the YAML names a class, and the functions that the YAML names.
"""

import importlib
import importlib.machinery
import importlib.util
import os
import re
import sys
from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from regimen.conf.errors import ConfigError, did_you_mean, nearest
from regimen.conf.interpolation import under
from regimen.conf.layout import PACKAGES, ROOT

_ROOTS = ("regimen", "timm", "torch", "torchmetrics", "torchvision")
# Importable by these names when started in a checkout. They are no packages of the user's, and our
# packages would be imported a second time, as other classes.
_OUR_CHECKOUT = ("benchmarks", "tests", *PACKAGES)

_extra: list[str] = []  # packages and exact paths, added by `allow`
_closed: set[str] = set()  # folders whose code may not be named, added by `close`


class TargetError(ConfigError):
    """A `_target_` that is refused, does not exist, or does not take its arguments."""


class Offer(NamedTuple):
    """What may be named in a module, as `module.Name`."""

    inside: str  # the package or module in which the objects must be defined
    classes: bool = True
    functions: bool | Collection[str] = False  # True: all that are documented; or their names
    only: Collection[str] = ()  # the names that may be used; (): all that the module documents
    without: tuple[str, ...] = ()  # patterns of names that may not be used
    compiled: tuple[str, ...] = ()  # what `__module__` is for its compiled functions


_SAMPLERS = (
    "BatchSampler DistributedSampler RandomSampler Sampler SequentialSampler SubsetRandomSampler"
    " WeightedRandomSampler default_collate default_convert"
)
_DATASETS = "ChainDataset ConcatDataset StackDataset Subset TensorDataset"
_METRICS = "classification clustering nominal regression retrieval segmentation wrappers"
# Names in torchmetrics.audio, .image and .text whose metrics download no network: some networks
# are pickled.
_AUDIO = (
    "ComplexScaleInvariantSignalNoiseRatio PermutationInvariantTraining"
    " ScaleInvariantSignalDistortionRatio ScaleInvariantSignalNoiseRatio SignalDistortionRatio"
    " SignalNoiseRatio SourceAggregatedSignalDistortionRatio"
)
_IMAGE = (
    "ErrorRelativeGlobalDimensionlessSynthesis MultiScaleStructuralSimilarityIndexMeasure"
    " PeakSignalNoiseRatio PeakSignalNoiseRatioWithBlockedEffect RelativeAverageSpectralError"
    " RootMeanSquaredErrorUsingSlidingWindow SpatialCorrelationCoefficient SpectralAngleMapper"
    " SpectralDistortionIndex StructuralSimilarityIndexMeasure TotalVariation"
    " UniversalImageQualityIndex VisualInformationFidelity"
)
_TEXT = (
    "BLEUScore CHRFScore CharErrorRate EditDistance ExtendedEditDistance MatchErrorRate Perplexity"
    " SQuAD TranslationEditRate WordErrorRate WordInfoLost WordInfoPreserved"
)
# `Weights` would accept any URL; the builders accept only known names.
_NO_BUILDERS = ("*Weights*", "get_model_*", "get_weight", "list_models")
_MODELS = [f"torchvision.models{part}" for part in ("", ".detection", ".segmentation", ".video")]
# The class methods that may be named. Any other method could be called on any object.
CONSTRUCTORS = ("torch.nn.Embedding.from_pretrained", "torch.nn.EmbeddingBag.from_pretrained")
_OFFERS = (
    Offer("torch.nn"),
    Offer(
        "torch.nn.functional",
        classes=False,
        functions=True,
        without=("upsample*",),  # deprecated
        compiled=("torch", "torch._C._nn"),
    ),
    Offer("torch.nn.utils.parametrizations", classes=False, functions=True),
    Offer("torch.optim"),
    Offer("torch.optim.lr_scheduler"),
    Offer("torch.optim.swa_utils", only=("SWALR",)),
    Offer("torch.utils.data", functions=True, only=f"{_SAMPLERS} {_DATASETS}".split()),
    Offer("torchvision.transforms"),
    *(Offer(module, functions=True, without=_NO_BUILDERS) for module in _MODELS),
    Offer("torchvision.ops", functions=True),
    # LSUN unpickles a file beside the data; the other two fetch URLs listed in a file.
    Offer("torchvision.datasets", without=("Kinetics", "LSUN*", "SBU")),
    Offer("torchmetrics"),
    Offer("timm", classes=False, functions=("create_model",)),
)
LIBRARIES: Mapping[str, Offer] = {
    **{offer.inside: offer for offer in _OFFERS},
    "torchvision.transforms.v2": Offer("torchvision.transforms"),
    # Lookahead wraps an optimizer, and Adahessian needs gradients that can be differentiated.
    "timm.optim": Offer("timm", without=("Adahessian", "Lookahead", "Optim*")),
    **{f"torchmetrics.{part}": Offer("torchmetrics") for part in _METRICS.split()},
    "torchmetrics.audio": Offer("torchmetrics", only=_AUDIO.split()),
    "torchmetrics.image": Offer("torchmetrics", only=_IMAGE.split()),
    "torchmetrics.text": Offer("torchmetrics", only=_TEXT.split()),
}


@cache
def _offers() -> Mapping[str, Offer]:
    """Return all offers by module: those of the libraries, and what our YAML files name of ours."""
    names_by_module: dict[str, set[str]] = {}
    for file in (ROOT / "conf").rglob("*.yaml"):
        for path in re.findall(r"_target_:\s*([\w.]+)", file.read_text(encoding="utf-8")):
            module, _, name = path.rpartition(".")
            if module.startswith("regimen."):
                names_by_module.setdefault(module, set()).add(name)
    offers = dict(LIBRARIES)
    for module, names in names_by_module.items():
        functions = [name for name in names if not name[0].isupper()]
        offers[module] = Offer(module, classes=len(functions) < len(names), functions=functions)
    return offers


def listed(path: str) -> tuple[str, str] | None:
    """Return the listed module that a path begins with, and the rest; None if there is none."""
    module = path.rpartition(".")[0]
    while module:
        if module in _offers():
            return module, path[len(module) + 1 :]
        module = module.rpartition(".")[0]
    return None


def allow(packages: Iterable[str]) -> None:
    """Allow further packages (or exact paths) for this process, as `--allow-target` does."""
    for package in packages:
        if not _is_path(package):
            raise TargetError("--allow-target", f"{package!r} is not the dotted path of a package")
        if package not in _extra:
            _extra.append(package)


def close(folders: Iterable[str]) -> None:
    """Offer no code below folders that hold configurations, for this process."""
    _closed.update(os.path.realpath(os.path.expanduser(folder)) for folder in folders)


def refusal(path: object) -> str | None:
    """Return why `path` may not be a target, by its name alone; None if it may.

    Imports nothing. It may look for the package in the working folder, without running it.
    """
    if not isinstance(path, str) or not _is_path(path):
        return f"{path!r:.80} is not the dotted path of a class or function"
    if under(path, _extra) or path in CONSTRUCTORS or _in_working_folder(path):
        return None
    parts = listed(path)
    if parts is None:
        module = _defining_module(path)
        if module is not None:
            return f"target {path!r} is no dotted path; did you mean {module}.{path}?"
        return f"target {path!r} is not allowed; {_how_to_allow(path)}"
    reason = _refused_name(*parts)
    return None if reason is None else f"{path!r} is not allowed: {reason}"


def _defining_module(name: str) -> str | None:
    """Return the module of the working folder that defines a bare name; reads, imports nothing."""
    if "." in name:
        return None
    for file in sorted(Path.cwd().glob("*.py")):
        with suppress(OSError, ValueError):
            if re.search(rf"^(class|def) {name}\b", file.read_text("utf-8"), re.MULTILINE):
                return file.stem
    return None


def _refused_name(module: str, name: str) -> str | None:
    """Return why a listed module does not offer a name; None if the name may be looked up."""
    offer = _offers()[module]
    if "." in name:
        return f"only names directly in {module} are, such as {module}.{name.rpartition('.')[2]}"
    if name.startswith("_"):
        return "it is private"
    is_excluded = any(fnmatchcase(name, pattern) for pattern in offer.without)
    if offer.only and name not in offer.only:
        is_excluded = True
    if not isinstance(offer.functions, bool):
        # Functions are offered by name. Nothing is imported here: a capital letter means a class.
        is_offered = offer.classes if name[0].isupper() else name in offer.functions
        is_excluded = is_excluded or not is_offered
    return f"{module} offers it, but not to configurations" if is_excluded else None


def locate(path: str) -> Any:
    """Import and return the class or function that `path` names.

    Raises TargetError if it is refused or not found. Exceptions raised by an allowed module while
    it is imported pass through.
    """
    reason = refusal(path)
    if reason is not None:
        raise TargetError(reason)
    parts = None if under(path, _extra) else listed(path)
    if parts is None:
        root, _, rest = path.partition(".")
        folder = _working_folder()
        if _in_working_folder(path) and not {folder, ""} & set(sys.path):
            sys.path.append(folder)  # last, so that no installed package is hidden by it
    else:
        root, rest = parts

    module = _import_module(root, path)
    parent: Any = None
    target: Any = module
    names = rest.split(".") if rest else []
    for name in names:
        parent = target
        target = _member(parent, name, path, may_be_module=parts is None)
    if not callable(target):
        raise TargetError(f"target {path!r} cannot be called: it is a {type(target).__name__}")

    if parts is None:
        reason = _refused_user_object(path, parent, target)
    else:
        reason = _refused_object(module, parts[1], target)
    if reason is not None and path not in CONSTRUCTORS:
        raise TargetError(f"{path!r} is not allowed: {reason}")
    return target


def _member(parent: Any, name: str, path: str, may_be_module: bool) -> Any:
    """Return `parent.name`. `may_be_module`: it may be a module of a package, which is imported.

    Raises TargetError if it does not exist, or is a module that may not be entered.
    """
    module_name = f"{getattr(parent, '__name__', '')}.{name}"
    is_package = isinstance(parent, ModuleType) and hasattr(parent, "__path__")
    # A submodule is an attribute of its package only once it was imported.
    is_missing = may_be_module and is_package and not hasattr(parent, name)
    if is_missing and importlib.util.find_spec(module_name):
        _import_module(module_name, path)
    if not hasattr(parent, name):
        place = getattr(parent, "__name__", type(parent).__name__)
        public = [other for other in dir(parent) if not other.startswith("_")]
        hint = _name_of_ours(path) or did_you_mean(name, public)
        raise TargetError("", f"target {path!r} does not exist: {place} has no {name!r}", hint)
    member = getattr(parent, name)
    if isinstance(member, ModuleType) and not (may_be_module and member.__name__ == module_name):
        raise TargetError(f"{path!r} is not allowed: it is in module {member.__name__}")
    return member


def _refused_object(module: ModuleType, name: str, target: Any) -> str | None:
    """Return why a listed module does not offer an object; None if it does."""
    offer = _offers()[module.__name__]
    documented = getattr(module, "__all__", None)
    if documented is not None and name not in documented:
        return f"{module.__name__} does not document it"
    owner = _owner(target)
    is_class = isinstance(target, type)
    is_compiled = owner in offer.compiled and not is_class
    if not is_compiled and not under(owner, [offer.inside]):
        return f"it belongs to {owner}"
    if "_deprecated" in owner.split(".") or "__deprecated__" in getattr(target, "__dict__", {}):
        return "it is deprecated"
    if is_class and (not offer.classes or issubclass(target, BaseException)):
        return "it is a class that a configuration cannot use"
    if not is_class and not offer.functions:
        return "it is a function that a configuration cannot use"
    return None


def _refused_user_object(path: str, parent: Any, target: Any) -> str | None:
    """Return why an object in a package of the user's, or of `allow`, is not offered by it."""
    is_class_method = getattr(target, "__self__", None) is parent
    if isinstance(parent, type) and not isinstance(target, type) and not is_class_method:
        return "it is a method, name a class or a function"
    owner = _owner(target)
    if path in _extra or under(owner, _extra) or _in_working_folder(owner):
        return None
    # The user's module may have imported it from a module where it could be named.
    name = str(getattr(target, "__name__", ""))
    for module, offer in _offers().items():
        if not name or not under(owner, [offer.inside]) or _refused_name(module, name) is not None:
            continue
        loaded = importlib.import_module(module)
        if getattr(loaded, name, None) is target and not _refused_object(loaded, name, target):
            return None
    return f"it belongs to {owner}; {_how_to_allow(owner)}"


def _owner(target: Any) -> str:
    """Return the name of the module that defines an object."""
    return str(getattr(target, "__module__", None) or type(target).__module__)


def _import_module(name: str, path: str) -> ModuleType:
    try:
        module = importlib.import_module(name)
    except Exception as error:
        missing = error.name if isinstance(error, ModuleNotFoundError) else None
        if missing and under(name, [missing]):
            raise TargetError(f"no package {name!r} is installed, which {path!r} needs") from error
        error.imported_for = path  # type: ignore[attr-defined]
        raise  # the module exists, and something in it fails
    if module.__name__ != name:
        raise TargetError(f"{path!r} is not allowed: {name} is really {module.__name__}")
    return module


def _in_working_folder(path: str) -> bool:
    """Return whether a path leads into a module or package of the working folder."""
    root = path.partition(".")[0]
    folder = _working_folder()
    if root in sys.stdlib_module_names or root in _ROOTS:
        return False
    if root in _OUR_CHECKOUT and Path(folder) == ROOT:
        return False
    return _is_offered_there(path, folder) and _import_folder(root, folder) == folder


def _import_folder(root: str, folder: str) -> str | None:
    """Return the folder from which `import root` reads a module or package; None if unknown."""
    module = sys.modules.get(root)
    if module is not None:
        spec = module.__spec__
    else:
        # The working folder comes last: an installed package of the same name is imported first.
        others = [entry for entry in sys.path if os.path.realpath(entry or ".") != folder]
        spec = importlib.machinery.PathFinder.find_spec(root, [*others, folder])
    if spec is None or not spec.origin:
        return None
    place = Path(os.path.realpath(spec.origin)).parent
    is_package = spec.submodule_search_locations is not None
    return str(place.parent if is_package else place)


def _is_offered_there(path: str, start: str) -> bool:
    """Return whether files named by a path are Python modules, or packages with `__init__.py`.

    No code below `runs/` or a folder of configurations is offered: such folders come from others.
    """
    folder = Path(start)
    closed = [folder / "runs", *map(Path, _closed)]
    closed = [other for other in closed if not folder.is_relative_to(other)]
    place = folder
    for part in path.split("."):
        place /= part
        # A link may lead into a closed folder, and a closed folder may be a link.
        for other in closed:
            if place.is_relative_to(other) or place.resolve().is_relative_to(other):
                return False
        if not (place / "__init__.py").is_file():
            if place.with_name(f"{part}.py").is_file():
                return True
            # Within a package it may be a class or function, but no folder without `__init__.py`.
            return place.parent != folder and not place.is_dir()
    return True


def _working_folder() -> str:
    """Return the folder where the program was started; empty if it was removed."""
    try:
        return os.path.realpath(os.getcwd())
    except FileNotFoundError:
        return ""


def _name_of_ours(path: str) -> str | None:
    """Return a hint with the whole name if a path lacks only the `regimen.` at its start."""
    module = path.rpartition(".")[0]
    return f"did you mean regimen.{path}?" if f"regimen.{module}" in _offers() else None


def _how_to_allow(path: str) -> str:
    """Return a hint: the name that may have been meant, or how to allow this one."""
    ours = _name_of_ours(path)
    if ours is not None:
        return ours
    module, _, name = path.rpartition(".")
    folder = _working_folder()
    files = os.listdir(folder) if os.access(folder, os.R_OK) else []
    modules = [*_offers(), *(file.removesuffix(".py") for file in files)]
    near = nearest(module, modules, cutoff=0.8)
    if near not in (None, module):
        return f"did you mean {near}.{name}?"
    # For an installed library only the exact path: `torch` as a whole could run anything.
    root = path.partition(".")[0]
    allowed = path if root in sys.stdlib_module_names or root in _ROOTS else root
    return (
        f"if you trust it, start with `--allow-target {allowed}`, or put it in the folder where "
        "you start, in packages with an __init__.py"
    )


def _is_path(path: str) -> bool:
    return len(path) <= 300 and all(p.isidentifier() and p[:2] != "__" for p in path.split("."))
