"""Every YAML file that is shipped: it opens with its command, composes, and its targets bind."""

import re
from pathlib import Path

import pytest

from conf.check import parse
from scripts.compose import compose
from trainer.build_check import check_targets

CONF = Path(__file__).resolve().parents[1] / "conf"
FILES = sorted(path.relative_to(CONF) for path in CONF.rglob("*.yaml"))
BASE = "resnet18"  # the experiment that a file of another group is tried in
# What a person has to give with a file, because it has no sensible default.
GIVEN = {
    "data=image_folder": ["data.root=images"],
    "model=finetune": ["model.weights=weights.pt"],
}
# The groups whose alternatives go with every experiment.
FREE = (
    "model",
    "data",
    "optimizer",
    "lr_scheduler",
    "transforms",
    "strategy",
    "callbacks",
    "debug",
)


def options(group: str) -> list[str]:
    return [path.stem for path in FILES if path.parent.as_posix() == group]


def overrides(group: str, option: str, experiment: str = BASE) -> list[str]:
    """Return the command line that picks an option of a group."""
    if group == "experiment":
        return [f"experiment={option}", *GIVEN.get(f"experiment={option}", [])]
    value = f"[default,{option}]" if group == "callbacks" and option != "default" else option
    given = GIVEN.get(f"{group}={option}", [])
    return [*overrides("experiment", experiment), f"+{group}={value}", *given]


def in_groups() -> list[object]:
    named = [(path.parent.as_posix(), path.stem) for path in FILES if path.parent != Path()]
    return [pytest.param(group, option, id=f"{group}={option}") for group, option in named]


def test_the_groups_that_experiments_are_varied_by_exist() -> None:
    assert options("experiment")
    assert [group for group in FREE if not options(group)] == []


@pytest.mark.parametrize("path", [pytest.param(path, id=path.as_posix()) for path in FILES])
def test_a_file_opens_with_the_command_that_uses_it(path: Path) -> None:
    first = (CONF / path).read_text(encoding="utf-8").partition("\n")[0]
    assert re.match(r"# (pip install \S+ && )?(train|evaluate|python -m) ", first)
    used = path.stem in first or path.name == "train.yaml" or path.stem == "default"
    assert used, f"{first!r} does not use {path}"


@pytest.mark.parametrize(("group", "option"), in_groups())
def test_an_option_composes_and_its_targets_bind(group: str, option: str) -> None:
    composed = compose(overrides(group, option))
    check_targets(parse(composed.config))


@pytest.mark.parametrize("experiment", options("experiment"))
def test_an_experiment_goes_with_every_alternative(experiment: str) -> None:
    for group in FREE:
        for option in options(group):
            parse(compose(overrides(group, option, experiment)).config)
