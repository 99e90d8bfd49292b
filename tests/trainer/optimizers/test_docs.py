"""The commands and the YAML that docs/optimization.md shows are good ones."""

import re
import shlex
from pathlib import Path

import pytest
import yaml
from torch import nn

from conf.check import parse
from scripts.composition.compose import compose
from trainer.build.check import check_targets
from trainer.lr_schedulers.schedule import build_lr_schedule
from trainer.optimizers.optimizers import build_optimizers

ROOT = Path(__file__).resolve().parents[3]
TEXT = (ROOT / "docs" / "optimization.md").read_text(encoding="utf-8")
TESTS = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
COMMANDS = re.findall(r"`train (experiment=[^`]*)`", TEXT)
BLOCKS = re.findall(r"```yaml\n(.*?)```", TEXT, re.DOTALL)


def network() -> nn.Module:
    layers = {"conv1": nn.Conv2d(1, 2, 3), "bn1": nn.BatchNorm2d(2), "fc": nn.Linear(2, 2)}
    return nn.ModuleDict({**layers, "hidden": nn.Linear(2, 2)})


@pytest.mark.parametrize("command", [pytest.param(c, id=c) for c in COMMANDS])
def test_a_command_composes_and_its_targets_bind(command: str) -> None:
    check_targets(parse(compose(shlex.split(command)).config))


def test_the_rule_given_on_a_command_line_composes() -> None:
    (override,) = re.findall(r"'(\+optimizer[^']*)'", TEXT)
    config = compose([override]).config
    assert config["optimizer"]["param_groups"]["stem"]["lr_scale"] == 0.1


def test_every_file_and_test_that_is_named_exists() -> None:
    for name in re.findall(r"`((?:optimizer|lr_scheduler)/[\w/]+\.yaml)`", TEXT):
        assert (ROOT / "conf" / name).is_file(), name
    for file, test in re.findall(r"(test_\w+\.py)(?:::(\w+))?`", TESTS):
        found = (ROOT / "tests").rglob(file)
        assert any(f"def {test}" in path.read_text(encoding="utf-8") for path in found), file


def test_the_yaml_builds() -> None:
    whole, rules, several, schedule = (yaml.safe_load(block) for block in BLOCKS)
    sgd = {"_target_": "torch.optim.SGD", "lr": 0.1, "weight_decay": 0.1}
    optimizers = build_optimizers(network(), whole["optimizer"])
    assert [g.name for g in optimizers.groups()] == ["default"]
    grouped = build_optimizers(network(), {**sgd, **rules})
    assert [row.group for row in grouped.table()] == ["no_decay", "head", "default", "frozen"]
    both = build_optimizers(network(), several["optimizer"])
    assert [group.name for group in both.groups()] == ["muon", "adamw"]
    built = build_lr_schedule(schedule["lr_scheduler"], both, 100, 10)
    assert list(built.tracks) == ["muon", "adamw"]
