"""Which keys make a run what it is; a sweep's job: its overrides, whatever their spelling."""

import functools
import json
import re
import shlex
from collections.abc import Iterable, Mapping
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException

from conf.errors import ConfigError, Problem, raise_problems
from scripts.composition.overrides import Swept

# Keys whose changes affect the place, the speed or the output of a run, but not its result.
_HARMLESS = {
    **dict.fromkeys(("name", "run_dir", "resume", "resume_policy", "dry_run", "strategy", "sweep")),
    "loader": "num_workers pin_memory prefetch_factor persistent_workers timeout eval"
    " eval_batch_size multiprocessing_context non_blocking prefetch_to_device",
    "data": "root cache cache_bytes cache_dir test predict",
    "trainer": "log_every_n_steps max_time gradient_accumulation_steps limit_test_batches compile"
    " validate_at_start detect_anomaly activation_checkpointing activation_checkpointing_segments",
    "callbacks": "progress tensorboard checkpoint model_summary lr_monitor throughput memory"
    " profiler mlflow wandb csv",
}
# Keys that say where and how a job runs, not what it trains.
_OUTSIDE = ("run_dir", "resume", "resume_policy", "sweep")


def trains_the_same(key: str) -> bool:
    """Return whether a run whose value of a dotted key is changed trains the same."""
    section, _, rest = key.partition(".")
    if section not in _HARMLESS:
        return False
    names = _HARMLESS[section]
    return names is None or rest.partition(".")[0] in names.split()


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


def refuse_untyped(section: str, values: Mapping[str, Any], texts: Iterable[str]) -> None:
    """Raise ConfigError for values of a section that files, not the overrides, have given it."""
    typed: dict[str, Any] = {}
    for text in texts:
        key = text.lstrip("+").partition("=")[0]
        if key == section or key.startswith(f"{section}."):
            value: Any = OverridesParser.create().parse_override(text).value()
            name = key[len(section) + 1 :]
            whole = value if isinstance(value, dict) else {}  # or the choice of a group
            typed |= {name: value} if name else whole
    problems = []
    for name, value in values.items():
        if typed.get(name) != value:
            spelled = re.sub(r'"(\w+)": ', r"\1: ", json.dumps(value))
            hint = f"if you trust it: {shlex.quote(f'{section}.{name}={spelled}')}"
            message = "comes from the command line only: it could run any program"
            problems.append(Problem(f"{section}.{name}", message, hint))
    raise_problems(problems)


@functools.cache
def _term(text: str) -> tuple[str, str]:
    """Return an override's key, and the override in a normalised spelling."""
    try:
        override = OverridesParser.create().parse_override(text)
    except HydraException as error:
        raise ConfigError(f"not an override: {text}") from error
    element = override.get_key_element().lstrip("+")
    return element.lstrip("~"), f"{element}={override.get_value_element_as_str()}"
