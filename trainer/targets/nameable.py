"""What a `_target_` may name of libraries and of Regimen, whatever a configuration says.

A library's module that is not listed here offers nothing, a listed one the kinds of objects listed
for it. Of Regimen's modules, those offer something of which a shipped YAML (`conf/`) names
something: their public classes if it names a class, and the functions that it names.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import lru_cache
from pathlib import Path
from types import ModuleType
from typing import Any

_ROOT = Path(__file__).resolve().parents[2]
_OURS = ("callbacks", "data", "models", "trainer")
_TARGET = re.compile(r"_target_:\s*([\w.]+)")


@dataclass(frozen=True, slots=True)
class Offer:
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


@lru_cache(maxsize=1)
def offers() -> Mapping[str, Offer]:
    """Return what each module offers."""
    named: dict[str, set[str]] = {}
    for file in (_ROOT / "conf").rglob("*.yaml"):
        for path in _TARGET.findall(file.read_text(encoding="utf-8")):
            module, _, name = path.rpartition(".")
            if module.partition(".")[0] in _OURS:
                named.setdefault(module, set()).add(name)
    ours = {}
    for module, names in named.items():
        functions = [name for name in names if not _is_class(name)]
        ours[module] = Offer(module, len(functions) < len(names), functions)
    return {**LIBRARIES, **ours}


def split(path: str) -> tuple[str, str] | None:
    """Return the listed module that a path begins with, and the rest; None if there is none."""
    module = path
    while (at := module.rfind(".")) > 0:
        module = module[:at]
        if module in offers():
            return module, path[at + 1 :]
    return None


def refusal_by_name(module: str, name: str) -> str | None:
    """Return why `name` of a listed module may not be a target, judging by the name alone."""
    offer = offers()[module]
    if f"{module}.{name}" in CONSTRUCTORS:
        return None
    if "." in name:
        return "it is not directly in a listed module"
    if name.startswith("_"):
        return "it is private"
    kept = any(fnmatchcase(name, pattern) for pattern in offer.without)
    if not isinstance(offer.functions, bool):  # names tell classes from functions
        kept |= not offer.classes if _is_class(name) else name not in offer.functions
    if kept or (offer.only and name not in offer.only):
        return f"{module} offers it, but not to configurations"
    return None


def refusal_of(module: ModuleType, name: str, found: Any) -> str | None:
    """Return why `found`, called `name` in a listed module, may not be a target; None if it may."""
    offer = offers()[module.__name__]
    if f"{module.__name__}.{name}" in CONSTRUCTORS:
        return None
    documented = getattr(module, "__all__", None)
    if documented is not None and name not in documented:
        return f"{module.__name__} does not document it"
    owner = getattr(found, "__module__", None) or type(found).__module__
    compiled = owner in offer.compiled and not isinstance(found, type)
    if not (f"{owner}.".startswith(f"{offer.inside}.") or compiled):
        return f"it belongs to {owner}"
    if "_deprecated" in owner.split(".") or "__deprecated__" in getattr(found, "__dict__", {}):
        return "it is deprecated"
    kind = "class" if isinstance(found, type) else "function"
    wanted = offer.classes if isinstance(found, type) else bool(offer.functions)
    if not wanted or (isinstance(found, type) and issubclass(found, BaseException)):
        return f"it is a {kind} that a configuration cannot use"
    return None


def is_offered(found: Any) -> bool:
    """Return whether some listed module offers an object."""
    name, owner = getattr(found, "__name__", None), getattr(found, "__module__", None)
    if not isinstance(name, str) or not isinstance(owner, str):
        return False
    for listed, offer in offers().items():
        within = f"{owner}.".startswith(f"{offer.inside}.")
        if within and refusal_by_name(listed, name) is None:
            module = importlib.import_module(listed)
            if getattr(module, name, None) is found:
                return refusal_of(module, name, found) is None
    return False


def _is_class(name: str) -> bool:
    return name[0].isupper()
