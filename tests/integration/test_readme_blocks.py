"""What the README prints under "Add your own" runs as printed: its files, then its commands."""

import re
import shlex
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SECTION = (ROOT / "README.md").read_text().split("## Add your own")[1].split("\n## ")[0]
BLOCK = re.compile(r"```(\w+)\n(.*?)```", re.DOTALL)


def commands() -> list[str]:
    lines = [
        line
        for kind, text in BLOCK.findall(SECTION)
        if kind == "bash"
        for line in text.splitlines()
    ]
    return [line.partition(" #")[0].strip() for line in lines if line.strip()]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    place = tmp_path_factory.mktemp("readme")
    for kind, text in BLOCK.findall(SECTION):
        if kind in ("python", "yaml"):
            name = text.splitlines()[0].removeprefix("# ")
            assert re.fullmatch(r"[\w/]+\.(py|yaml)", name), (
                f"{name}: the first line names the file"
            )
            (place / name).parent.mkdir(parents=True, exist_ok=True)
            (place / name).write_text(text)
    return place


def test_there_are_commands() -> None:
    assert len(commands()) >= 3


@pytest.mark.parametrize("command", commands())
def test_it_runs_as_printed(train, folder, command):
    program, *arguments = shlex.split(command)
    assert program == "train"
    done = train(arguments, folder=folder)
    assert done.code == 0, done.err
    assert ("epoch 10\n" in done.out) == ("Shout" in command)
