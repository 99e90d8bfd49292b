"""Every mistake of the table names its key, file and way out, all of them together (I9)."""

import os
from collections import Counter, defaultdict
from pathlib import Path

import pytest
import yaml

from conf.check import parse
from conf.errors import ConfigError
from scripts.composition.compose import compose
from trainer.assembly.check import check_targets

TABLE = yaml.safe_load((Path(__file__).parents[1] / "mistakes.yaml").read_text())
HEAD = "# @package _global_\n"


def check(argv):
    composed = compose(argv)
    with composed.locating():
        check_targets(parse(composed.config))


def mistakes(*argv):
    """Return the error that a command line ends in, before data are read or anything is built."""
    with pytest.raises(ConfigError) as caught:
        check(list(argv))
    return caught.value


def mine(folder, text):
    """Write an experiment into a folder of the user's; return the line that chooses it."""
    (folder / "experiment").mkdir(exist_ok=True)
    (folder / "experiment" / "mine.yaml").write_text(text)
    return ["--config-dir", str(folder), "experiment=mine"]


def rounds(name):
    """Share rows out so that a round has one for each key; all are reported together."""
    turns: Counter[str] = Counter()
    found: dict[int, list] = defaultdict(list)
    for row in TABLE[name]:
        found[turns[row[1]]].append(row)
        turns[row[1]] += 1
    return [pytest.param(rows, id=f"{name}-{n}") for n, rows in found.items()]


@pytest.mark.parametrize(
    "rows",
    [
        *(one for name in ("together", "arguments", "targets") for one in rounds(name)),
        *(pytest.param([row], id=str(row[0])) for row in TABLE["alone"]),
    ],
)
def test_a_mistake_names_its_key_and_the_way_out(rows):
    lines = [row[0].split(" ") if isinstance(row[0], str) else row[0] for row in rows]
    typed = [override for line in lines for override in line]
    first = [] if len(rows) == 1 and typed[0].startswith("experiment=") else ["experiment=resnet18"]
    error = mistakes(*first, *typed)
    assert error.exit_code == 2
    for row in rows:
        message = " ".join(str(p) for p in error.problems if p.key == row[1])
        assert [text for text in row[2:] if text not in message] == [], (row, message)


def test_a_part_that_cannot_be_built_is_not_tried_as_well():
    error = mistakes("experiment=resnet18", "model=mlp", "task.loss.label_smoothing=7")
    assert [problem.key for problem in error.problems] == ["task.loss"]


@pytest.mark.parametrize("row", [pytest.param(row, id=repr(row[0])) for row in TABLE["files"]])
def test_a_mistake_in_a_file_is_told_with_its_line_and_does_nothing(row, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    before = dict(os.environ)
    message = str(mistakes(*mine(tmp_path, f"{HEAD}{row[0]}\n")))
    assert [text for text in row[1:] if text not in message] == [], message
    assert [path.name for path in tmp_path.iterdir()] == ["experiment"]
    assert dict(os.environ) == before


def test_mistakes_of_whole_files_are_told(tmp_path):
    text = "defaults:\n  - override /model: mlp\ntrainer: {max_steps: 2}\n"
    message = str(mistakes(*mine(tmp_path, text)))  # it is the only mistake
    assert message.startswith("must open with `# @package _global_`")
    assert "\n" not in message
    text = "# @package hydra.job\nenv_set: {A: b}\n"
    assert "Hydra's own keys" in str(mistakes(*mine(tmp_path, text)))
    text = "a0: &a0 [x, x, x, x, x, x, x, x, x]\n"
    text += "".join(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]\n" for i in range(1, 12))
    assert "aliases write out" in str(mistakes(*mine(tmp_path, HEAD + text)))
    typed = mine(tmp_path, f"{HEAD}defaults: [other]\n")
    (tmp_path / "experiment" / "other.yaml").write_text(f"{HEAD}defaults: [mine]\n")
    message = str(mistakes(*typed))
    assert "mine.yaml" in message
    assert "other.yaml" in message
    assert "there is no folder" in str(mistakes("--config-dir", str(tmp_path / "nowhere")))
    assert "--config-dir" in str(mistakes("--config-dir", "d" * 300))


def test_what_the_command_line_may_say_and_a_file_may_not():
    typed = ["run_dir=/my/out", "resume=auto", "data.root='http://HOST/${oc.env:HOME}'"]
    config = compose(["data=image_folder", *typed]).config
    assert (config["run_dir"], config["resume"]) == ("/my/out", "auto")
    assert config["data"]["root"] == config["data"]["train"]["root"]
    assert compose(["data=cifar10"]).config["data"]["root"]  # a path of the environment
