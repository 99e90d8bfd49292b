"""Why a name, or what it names, may not be a target, by the list of what may."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from fnmatch import fnmatchcase
from types import ModuleType
from typing import Any

from trainer.targets.nameable import OFFERS, Offer


def split(path: str) -> tuple[str, str] | None:
    """Return the listed module that a path begins with, and the rest; None if there is none."""
    module = path
    while (at := module.rfind(".")) > 0:
        module = module[:at]
        if module in OFFERS:
            return module, path[at + 1 :]
    return None


def refusal_by_name(module: str, name: str) -> str | None:
    """Return why `name` of a listed module may not be a target, judging by the name alone."""
    offer = OFFERS[module]
    if name in offer.constructors:
        return None
    if "." in name:
        return "it is not directly in a listed module"
    if name.startswith("_"):
        return "it is private"
    kept = any(fnmatchcase(name, pattern) for pattern in offer.without)
    if kept or (offer.only and name not in offer.only):
        return f"{module} offers it, but not to configurations"
    return None


def refusal_of(module: ModuleType, name: str, found: Any) -> str | None:
    """Return why `found`, called `name` in a listed module, may not be a target; None if it may."""
    offer = OFFERS[module.__name__]
    if name in offer.constructors:
        return None
    documented = getattr(module, "__all__", None)
    if documented is not None and name not in documented:
        return f"{module.__name__} does not document it"
    owner = getattr(found, "__module__", None) or type(found).__module__
    defined = owner == offer.inside or owner.startswith(f"{offer.inside}.")
    if not defined and not (owner in offer.compiled and not isinstance(found, type)):
        return f"it belongs to {owner}"
    if "_deprecated" in owner.split(".") or "__deprecated__" in _own_attributes(found):
        return "it is deprecated"
    return _refusal_of_kind(offer, name, found)


def _refusal_of_kind(offer: Offer, name: str, found: Any) -> str | None:
    if isinstance(found, type):
        wanted = offer.classes and not issubclass(found, BaseException)
    elif isinstance(offer.functions, tuple):
        wanted = name in offer.functions
    else:
        wanted = offer.functions
    kind = "class" if isinstance(found, type) else "function"
    return None if wanted else f"it is a {kind} that a configuration cannot use"


def _own_attributes(found: Any) -> Mapping[str, Any]:
    """Return an object's own attributes, without inherited ones."""
    return getattr(found, "__dict__", {})


def is_offered(found: Any) -> bool:
    """Return whether some listed module offers an object."""
    name = getattr(found, "__name__", None)
    owner = getattr(found, "__module__", None)
    if not isinstance(name, str) or not isinstance(owner, str):
        return False
    for module_name, offer in OFFERS.items():
        if owner != offer.inside and not owner.startswith(f"{offer.inside}."):
            continue
        if refusal_by_name(module_name, name) is None:
            module = importlib.import_module(module_name)
            if getattr(module, name, None) is found:
                return refusal_of(module, name, found) is None
    return False
