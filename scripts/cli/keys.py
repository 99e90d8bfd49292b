"""The keys of a command on a finished run: text becomes values, all mistakes are told at once."""

import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from conf.errors import Problem, did_you_mean, nearest
from conf.fields import declared
from conf.schema import Config
from scripts.cli.arguments import Arguments

Take = Callable[[str], Any]  # from the text to the value; ValueError says what the text is not


def one_of(*words: str) -> Take:
    """Take one of some words."""

    def take(text: str) -> str:
        if text not in words:
            raise ValueError(f"one of {', '.join(words)}")
        return text

    return take


def true_or_false(text: str) -> bool:
    """Take a flag."""
    return bool(one_of("true", "false")(text) == "true")


def whole(low: int = 1, high: int | None = None) -> Take:
    """Take an integer of at most six digits."""
    span = f"from {low} on" if high is None else f"from {low} to {high}"

    def take(text: str) -> int:
        number = int(text) if re.fullmatch(r"\d{1,6}", text, re.ASCII) else -1
        if not low <= number <= (high or 999_999):
            raise ValueError(f"a number {span}")
        return number

    return take


def matching(pattern: str, words: str) -> Take:
    """Take text that matches a whole pattern, which `words` describe."""

    def take(text: str) -> str:
        if not re.fullmatch(pattern, text):
            raise ValueError(words)
        return text

    return take


def or_null(take: Take) -> Take:
    """Take what `take` does, and `null` as None."""
    return lambda text: None if text == "null" else take(text)


def own_keys(overrides: Sequence[str], names: Collection[str]) -> tuple[dict[str, str], list[str]]:
    """Split overrides into the keys of a command on a finished run, by name, and all others."""
    split = {text: text.partition("=") for text in overrides}
    own = {key: value for key, equals, value in split.values() if equals and key in names}
    others = [text for text in overrides if not (split[text][1] and split[text][0] in names)]
    return own, others


def misspelt(others: Sequence[str], names: Collection[str]) -> Iterator[Problem]:
    """Yield a problem for each override that is no key of a configuration, but nearly of ours."""
    roots = declared(Config)
    for key in (override.partition("=")[0] for override in others):
        if key not in roots and (near := nearest(key, [*names, *roots])) in names:
            yield Problem(key, "unknown key", f"did you mean {near}?")


def taken(
    given: Mapping[str, str], keys: Mapping[str, Take]
) -> tuple[dict[str, Any], list[Problem]]:
    """Return the values of keys, and what is wrong with the texts that are none."""
    values: dict[str, Any] = {}
    problems = []
    for key, text in given.items():
        try:
            values[key] = keys[key](text)
        except ValueError as error:
            problems.append(Problem(key, f"is {text!r}, not {error}"))
    return values, problems


def only_keys(
    command: str, overrides: Sequence[str], keys: Mapping[str, Take], required: Mapping[str, str]
) -> tuple[dict[str, Any], list[Problem]]:
    """Return the values of a command that takes no other keys, and all problems.

    required: the keys that may not be missing, each with what it wants. `run` must hold a run.
    """
    own, others = own_keys(overrides, tuple(keys))
    known = f"known are {', '.join(keys)}"
    problems = [
        Problem(key, f"is no key of {command}", did_you_mean(key, keys) or known)
        for key in (override.partition("=")[0] for override in others)
    ]
    values, wrong = taken(own, keys)
    problems += [Problem(k, f"missing: {what}") for k, what in required.items() if not own.get(k)]
    return values, problems + wrong + run_problems(own.get("run"))


def run_problems(run: str | None) -> list[Problem]:
    """Return what is wrong with a key `run` that is given."""
    if not run or (Path(run) / "config.yaml").is_file():
        return []
    return [Problem("run", f"{run} holds no run: it has no config.yaml")]


def of_run(arguments: Arguments, run_dir: str, overrides: Sequence[str]) -> Arguments:
    """Return the command line that composes a run's own configuration, with overrides."""
    return Arguments(
        overrides=tuple(overrides),
        config_name="config",
        config_dirs=(run_dir,),
        allow_targets=arguments.allow_targets,
    )
