"""What a `_target_` may name, and the class or function that it names.

A configuration may come from anyone. It can only name what is offered here of the libraries and of
Regimen, what lies in packages of the folder where the program was started, and what
`--allow-target` allows on the command line. No YAML can extend the list.

A library's module that is not listed offers nothing, a listed one the kinds of objects listed for
it. Of Regimen's modules, those offer something of which a shipped YAML (`conf/`) names something:
their public classes if it names a class, and the functions that it names.
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
from regimen.conf.layout import PACKAGES, ROOT

_ROOTS = ("regimen", "timm", "torch", "torchmetrics", "torchvision")
# Importable when started in a checkout; of our packages a second copy would be.
_OUR_CHECKOUT = ("benchmarks", "tests", *PACKAGES)

_extra: list[str] = []  # packages and exact paths that `allow` has added
_closed: set[str] = set()  # folders whose files a configuration may not name


class TargetError(ConfigError):
    """A `_target_` that is refused, does not exist, or does not take its arguments."""


class Offer(NamedTuple):
    """What may be named in a module, as `module.Name`."""

    inside: str  # the package or module in which the objects must be defined
    classes: bool = True
    functions: bool | Collection[str] = False  # all that are documented, or these
    only: Collection[str] = ()  # these names; (): all that the module documents
    without: tuple[str, ...] = ()  # patterns of names
    compiled: tuple[str, ...] = ()  # `__module__` of its compiled functions


_SAMPLERS = (
    "BatchSampler DistributedSampler RandomSampler Sampler SequentialSampler SubsetRandomSampler"
    " WeightedRandomSampler default_collate default_convert"
)
_DATASETS = "ChainDataset ConcatDataset StackDataset Subset TensorDataset"
_METRICS = "classification clustering nominal regression retrieval segmentation wrappers"
# Of these three modules what downloads no network; some of those are pickled.
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
# Class methods that may be named, where others could be called on any object.
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
    **{f"torchmetrics.{part}": Offer("torchmetrics") for part in _METRICS.split()},
    "torchmetrics.audio": Offer("torchmetrics", only=_AUDIO.split()),
    "torchmetrics.image": Offer("torchmetrics", only=_IMAGE.split()),
    "torchmetrics.text": Offer("torchmetrics", only=_TEXT.split()),
}


@cache
def _offers() -> Mapping[str, Offer]:
    named: dict[str, set[str]] = {}
    for file in (ROOT / "conf").rglob("*.yaml"):
        for path in re.findall(r"_target_:\s*([\w.]+)", file.read_text(encoding="utf-8")):
            module, _, name = path.rpartition(".")
            if module.startswith("regimen."):
                named.setdefault(module, set()).add(name)
    ours = {}
    for module, names in named.items():
        functions = [name for name in names if not name[0].isupper()]
        ours[module] = Offer(module, len(functions) < len(names), functions)
    return {**LIBRARIES, **ours}


def listed(path: str) -> tuple[str, str] | None:
    """Return the listed module that a path begins with, and the rest; None if there is none."""
    module = path
    while (at := module.rfind(".")) > 0:
        module = module[:at]
        if module in _offers():
            return module, path[at + 1 :]
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


def under(path: str, prefixes: Iterable[str]) -> bool:
    """Return whether a dotted path is one of `prefixes`, or below one."""
    return any(path == prefix or path.startswith(prefix + ".") for prefix in prefixes)


def refusal(path: object) -> str | None:
    """Return why `path` may not be a target, by its name alone; None if it may.

    Imports nothing. It may look for the package in the working folder, without running it.
    """
    if not isinstance(path, str) or not _is_path(path):
        return f"{path!r:.80} is not the dotted path of a class or function"
    if under(path, _extra) or path in CONSTRUCTORS or _in_working_folder(path):
        return None
    if (found := listed(path)) is None:
        module = _defining(path)
        if module:
            return f"target {path!r} is no dotted path; did you mean {module}.{path}?"
        return f"target {path!r} is not allowed; {_how_to_allow(path)}"
    reason = _refused_name(*found)
    return None if reason is None else f"{path!r} is not allowed: {reason}"


def _defining(name: str) -> str | None:
    """Return the module of the working folder that defines a bare name; reads, imports nothing."""
    if "." in name:
        return None
    for file in sorted(Path.cwd().glob("*.py")):
        with suppress(OSError, ValueError):
            if re.search(rf"^(class|def) {name}\b", file.read_text("utf-8"), re.MULTILINE):
                return file.stem
    return None


def _refused_name(module: str, name: str) -> str | None:
    offer = _offers()[module]
    if "." in name:
        return f"only names directly in {module} are, such as {module}.{name.rpartition('.')[2]}"
    if name.startswith("_"):
        return "it is private"
    kept = any(fnmatchcase(name, pattern) for pattern in offer.without)
    if not isinstance(offer.functions, bool):  # names tell classes from functions
        kept |= not offer.classes if name[0].isupper() else name not in offer.functions
    if kept or (offer.only and name not in offer.only):
        return f"{module} offers it, but not to configurations"
    return None


def locate(path: str) -> Any:
    """Import and return the class or function that `path` names.

    Raises TargetError if it is refused or not found. Exceptions raised by an allowed module while
    it is imported pass through.
    """
    if (reason := refusal(path)) is not None:
        raise TargetError(reason)
    known = None if under(path, _extra) else listed(path)
    root, _, rest = path.partition(".") if known is None else (known[0], ".", known[1])
    folder = _working_folder()
    if known is None and _in_working_folder(path) and not {folder, ""} & set(sys.path):
        sys.path.append(folder)  # after all that is installed
    parent: Any = None
    module = found = _import_module(root, path)
    for name in rest.split(".") if rest else ():
        inner = f"{getattr(found, '__name__', '')}.{name}"
        package = known is None and isinstance(found, ModuleType) and hasattr(found, "__path__")
        if package and not hasattr(found, name) and importlib.util.find_spec(inner):
            _import_module(inner, path)
        if not hasattr(found, name):
            place = getattr(found, "__name__", type(found).__name__)
            others = [n for n in dir(found) if not n.startswith("_")]
            hint = _name_of_ours(path) or did_you_mean(name, others)
            raise TargetError("", f"target {path!r} does not exist: {place} has no {name!r}", hint)
        parent, found = found, getattr(found, name)
        if isinstance(found, ModuleType) and (known or found.__name__ != inner):
            raise TargetError(f"{path!r} is not allowed: it is in module {found.__name__}")
    if not callable(found):
        raise TargetError(f"target {path!r} cannot be called: it is a {type(found).__name__}")
    reason = _refused_object(module, known[1], found) if known else _not_theirs(path, parent, found)
    if reason is not None and path not in CONSTRUCTORS:
        raise TargetError(f"{path!r} is not allowed: {reason}")
    return found


def _refused_object(module: ModuleType, name: str, found: Any) -> str | None:
    offer = _offers()[module.__name__]
    documented, owner = getattr(module, "__all__", None), _owner(found)
    if documented is not None and name not in documented:
        return f"{module.__name__} does not document it"
    is_class = isinstance(found, type)
    if not (under(owner, [offer.inside]) or (owner in offer.compiled and not is_class)):
        return f"it belongs to {owner}"
    if "_deprecated" in owner.split(".") or "__deprecated__" in getattr(found, "__dict__", {}):
        return "it is deprecated"
    wanted = offer.classes if is_class else bool(offer.functions)
    if not wanted or (is_class and issubclass(found, BaseException)):
        return f"it is a {'class' if is_class else 'function'} that a configuration cannot use"
    return None


def _not_theirs(path: str, parent: Any, found: Any) -> str | None:
    """Say why an object in a package of the user's, or of `allow`, is not one that it offers."""
    of_class = isinstance(found, type) or getattr(found, "__self__", None) is parent
    if isinstance(parent, type) and not of_class:
        return "it is a method, name a class or a function"
    owner, name = _owner(found), str(getattr(found, "__name__", ""))
    if path in _extra or under(owner, _extra) or _in_working_folder(owner):
        return None
    for module, offer in _offers().items():  # what was imported from where it could be named
        if under(owner, [offer.inside]) and name and _refused_name(module, name) is None:
            loaded = importlib.import_module(module)
            if getattr(loaded, name, None) is found and not _refused_object(loaded, name, found):
                return None
    return f"it belongs to {owner}; {_how_to_allow(owner)}"


def _owner(found: Any) -> str:
    return str(getattr(found, "__module__", None) or type(found).__module__)


def _import_module(name: str, path: str) -> ModuleType:
    try:
        module = importlib.import_module(name)
    except Exception as error:
        missing = isinstance(error, ModuleNotFoundError) and error.name
        if missing and under(name, [missing]):
            raise TargetError(f"no package {name!r} is installed, which {path!r} needs") from error
        error.imported_for = path  # type: ignore[attr-defined]
        raise  # the module exists, and something in it fails
    if module.__name__ != name:
        raise TargetError(f"{path!r} is not allowed: {name} is really {module.__name__}")
    return module


def _in_working_folder(path: str) -> bool:
    """Return whether a path leads into a module or package of the working folder."""
    root, folder = path.partition(".")[0], _working_folder()
    if root in sys.stdlib_module_names or root in _ROOTS:
        return False
    if (root in _OUR_CHECKOUT and Path(folder) == ROOT) or not _is_offered_there(path, folder):
        return False
    if (module := sys.modules.get(root)) is not None:
        spec = module.__spec__
    else:  # an installed package of the same name is imported first
        others = [p for p in sys.path if os.path.realpath(p or ".") != folder]
        spec = importlib.machinery.PathFinder.find_spec(root, [*others, folder])
    if spec is None or not spec.origin:
        return False
    place = Path(os.path.realpath(spec.origin)).parent
    return str(place if spec.submodule_search_locations is None else place.parent) == folder


def _is_offered_there(path: str, start: str) -> bool:
    """Return whether files named by a path are Python modules, or packages with `__init__.py`.

    Nothing below `runs/` or a folder of configurations is: such folders come from others.
    """
    place = folder = Path(start)
    closed = [c for c in (folder / "runs", *map(Path, _closed)) if not folder.is_relative_to(c)]
    for part in path.split("."):
        place /= part
        if any(p.is_relative_to(c) for p in (place, place.resolve()) for c in closed):
            return False
        if not (place / "__init__.py").is_file():
            module = place.with_name(f"{part}.py").is_file()
            return module or (place.parent != folder and not place.is_dir())
    return True


def _working_folder() -> str:
    try:
        return os.path.realpath(os.getcwd())
    except FileNotFoundError:
        return ""


def _name_of_ours(path: str) -> str | None:
    """Return a hint with the whole name of what a path names without `regimen.`, or None."""
    module, _, _ = path.rpartition(".")
    return f"did you mean regimen.{path}?" if f"regimen.{module}" in _offers() else None


def _how_to_allow(path: str) -> str:
    root, folder = path.partition(".")[0], _working_folder()
    files = os.listdir(folder) if os.access(folder, os.R_OK) else []
    module, _, name = path.rpartition(".")
    if ours := _name_of_ours(path):
        return ours
    near = nearest(module, [*_offers(), *(file.removesuffix(".py") for file in files)], cutoff=0.8)
    if near not in (None, module):
        return f"did you mean {near}.{name}?"
    # Of installed libraries only the exact path: `torch` as a whole could run anything.
    allowed = path if root in sys.stdlib_module_names or root in _ROOTS else root
    way = "put it in the folder where you start, in packages with an __init__.py"
    return f"if you trust it, start with `--allow-target {allowed}`, or {way}"


def _is_path(path: str) -> bool:
    return len(path) <= 300 and all(p.isidentifier() and p[:2] != "__" for p in path.split("."))
