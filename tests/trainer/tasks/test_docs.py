"""The commands, files and tests that docs/tasks.md and docs/finetuning.md name are there."""

import re
import shlex
from pathlib import Path

import pytest

from conf.check import parse
from scripts.composition.compose import compose
from trainer.build.check import check_targets
from trainer.task import Task

ROOT = Path(__file__).resolve().parents[3]
PAGES = {name: (ROOT / "docs" / f"{name}.md").read_text() for name in ("tasks", "finetuning")}
TEXT = "\n".join(PAGES.values())
COMMANDS = sorted(set(re.findall(r"(?:`|    )train (experiment=[^`\n]*)", TEXT)))
NEEDS = {"torchmetrics": "torchmetrics", "model=timm": "timm", "mine.": "mine"}


@pytest.mark.parametrize("command", [pytest.param(c, id=c) for c in COMMANDS])
def test_a_command_composes_and_its_targets_bind(command: str) -> None:
    for word, package in NEEDS.items():
        if word in command:
            pytest.importorskip(package)
    check_targets(parse(compose(shlex.split(command)).config))


def test_the_files_that_are_named_exist() -> None:
    groups = "task|data|transforms|trainer|model|optimizer|callbacks"
    for name in re.findall(rf"`((?:{groups})/[\w/]+\.yaml)`", TEXT):
        assert (ROOT / "conf" / name).is_file(), name
    for name in re.findall(r"`((?:trainer|data|models)/[\w/]+\.py)`", PAGES["tasks"]):
        assert (ROOT / name).is_file() or (ROOT / "tests" / name).is_file(), name


def test_the_tests_that_are_named_exist() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text() + TEXT
    sources = {path.name: path.read_text() for path in (ROOT / "tests").rglob("test_*.py")}
    for file in re.findall(r"(test_\w+\.py)", text):
        assert file in sources, file
    for file, test in re.findall(r"(test_\w+\.py)::(\w+)", text):
        assert f"def {test}(" in sources[file], test
    alone = set(re.findall(r"`(test_\w+)`", text))
    everything = "\n".join(sources.values())
    assert [test for test in alone if f"def {test}(" not in everything] == []


def test_the_task_of_one_s_own_is_one() -> None:
    (code,) = re.findall(r"```python\n(.*?)```", PAGES["tasks"], re.DOTALL)
    names: dict[str, object] = {}
    exec(code, names)
    assert issubclass(names["Cautious"], Task)
