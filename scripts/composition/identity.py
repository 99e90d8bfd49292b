"""The identity of a sweep's job: its overrides, independent of order and spelling."""

import functools
from collections.abc import Iterable

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException

from conf.errors import ConfigError, Problem, raise_problems
from scripts.composition.overrides import Swept

# Keys that say where and how a job runs, not what it trains.
_OUTSIDE = ("run_dir", "resume", "resume_policy", "sweep")


def identity(texts: Iterable[str]) -> tuple[str, ...]:
    """Return the overrides that identify a job, sorted by key, in one spelling.

    Overrides of the same key keep their order, in which they are applied. Raises ConfigError for a
    text that is not an override.
    """
    terms = [term for text in texts if not belongs_outside((term := _term(text))[0])]
    return tuple(dict.fromkeys(text for _, text in sorted(terms, key=lambda term: term[0])))


def belongs_outside(key: str) -> bool:
    """Return whether a key does not affect what a job trains."""
    return key.partition(".")[0] in _OUTSIDE


def refuse_outside(varied: Iterable[str]) -> None:
    """Raise ConfigError for varied keys that do not affect what a job trains."""
    message = "cannot vary between the jobs of a sweep: it is the same for all of them"
    raise_problems(Problem(key, message) for key in varied if belongs_outside(key))


def distinct(jobs: Iterable[list[Swept]]) -> list[list[Swept]]:
    """Return the jobs without duplicates. Raises ConfigError if a varied key identifies none."""
    found: dict[tuple[str, ...], list[Swept]] = {}
    for job in jobs:
        refuse_outside(override.key for override in job if override.varies)
        found.setdefault(identity(override.text for override in job), job)
    return list(found.values())


@functools.cache
def _term(text: str) -> tuple[str, str]:
    """Return an override's key, and the override in a normalised spelling."""
    try:
        override = OverridesParser.create().parse_override(text)
    except HydraException as error:
        raise ConfigError(f"not an override: {text}") from error
    element = override.get_key_element().lstrip("+")
    return element.lstrip("~"), f"{element}={override.get_value_element_as_str()}"
