"""Every mistake of the table names its key, file and way out, all of them together (I9)."""

import os
import subprocess
import sys
from collections import Counter, defaultdict
from pathlib import Path

import pytest
import yaml

from regimen.conf.check import parse
from regimen.conf.errors import ConfigError
from regimen.conf.layout import ROOT
from regimen.scripts.cli.console import report
from regimen.scripts.composition.compose import compose
from regimen.scripts.train import train
from regimen.trainer.assembly.check import check_targets

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


def all_mistakes(*argv):
    error = mistakes(*argv)
    return [*error.problems, *(error.more() if error.more else [])]


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


# Of each kind one: what is written, and the key that the answer names. Pairs are told in one try,
# but for those of which one hides what the other is about.
KINDS = {
    "unknown": ("sed=1", "sed"),
    "unknown in a section": ("trainer.max_epoch=3", "trainer.max_epoch"),
    "type": ("trainer.log_every_n_steps=abc", "trainer.log_every_n_steps"),
    "range": ("loader.batch_size=0", "loader.batch_size"),
    "type in a node": ("optimizer.lr=abc", "optimizer.lr"),
    "choice": ("lr_scheduler=cosin", "lr_scheduler"),
    "model": ("model=resnet19", "model"),
    "experiment": ("+experiment=resnet81", "experiment"),
    "grammar": ("run_dir=~/x", "run_dir=~/x"),
    "several values": ("seed=1,2", "seed"),
    "variable": ("name=${oc.env:REGIMEN_NOT_SET}", "name"),
    "loop": ("trainer.max_time=${trainer.max_time}", "trainer.max_time"),
    "hydra": ("hydra.run.dir=x", "hydra.run.dir"),
    "conflict": ("trainer.clip_grad_per_group=true", "trainer.clip_grad_per_group"),
    "target": ("task.loss._target_=torch.nn.CrossEntropyLos", "task.loss._target_"),
    "refused target": ("+callbacks.x._target_=os.system", "callbacks.x._target_"),
    "argument": ("+optimizer.lrr=3", "optimizer.lrr"),
    "argument of the model": ("+model.dept=3", "model.dept"),
    "value of an argument": ("model.dropout=[1]", "model.dropout"),
    "missing argument": ("~model.num_classes", "model.num_classes"),
    "monitor": ("callbacks.early_stopping.monitor=val/acuracy", "callbacks.early_stopping.monitor"),
    "rule": ("optimizer.param_groups={a:{match:zzz}}", "optimizer.param_groups.a"),
    "constructor": (
        "+callbacks.swa={_target_:regimen.callbacks.swa.SWA,start_epoch:5.5}",
        "callbacks.swa",
    ),
    "loss": ("task.loss.label_smoothing=7", "task.loss"),
    "class": ("+callbacks.y._target_=torch.nn.Identity", "callbacks.y._target_"),
    "transform": ("+transforms.train.z={_target_:torch.nn.Fold}", "transforms.train.z.kernel_size"),
    "device": ("strategy.accelerator=tpu", "strategy.accelerator"),
    "data": ("+data.train.shuffle=1", "data.train.shuffle"),
}
MODELS = {"argument of the model", "value of an argument", "missing argument"}
HIDDEN = [{"target", "loss"}, *({kind, "rule"} for kind in MODELS)]
NAMES = list(KINDS)
PAIRS = [(one, NAMES[place - step]) for place, one in enumerate(NAMES) for step in (1, 9)]


@pytest.mark.parametrize(
    "pair", [pytest.param(pair, id=" + ".join(pair)) for pair in PAIRS if {*pair} not in HIDDEN]
)
def test_two_kinds_of_mistakes_are_told_in_one_try(pair):
    rows = [KINDS[name] for name in pair]
    keys = {problem.key for problem in all_mistakes(*(text for text, _ in rows))}
    assert {key for _, key in rows} <= keys
    # Nothing else is a mistake, but for the arguments that such a transform lacks as well.
    assert {key for key in keys if "train.z" not in key} <= {key for _, key in rows}


def test_lines_of_other_habits_are_led_to_the_right_one(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "conf").mkdir()
    mine(tmp_path / "conf", f"{HEAD}name: mine\n")
    (tmp_path / "mine.py").write_text("class Net: ...\n")
    for line, words in {
        "experiment=mine": "is found with --config-dir conf",
        "--config-dir conf/experiment experiment=mine": "--config-dir conf",
        "conf/experiment/mine.yaml": "write --config-dir conf experiment=mine",
        "model._target_=Net": "did you mean mine.Net?",
        "optimizer=adam(lr=0.1)": "write optimizer=adam optimizer.lr=0.1",
        "optimizer.lr=0,001": "optimizer.lr=0.001",
        "+trainer.min_epochs=3": "callbacks.early_stopping.patience",
        "trainer.max_steps_per_epoch=3": "it is called trainer.limit_train_batches here",
        "task_name=x": "it is called name here",
        "name=${eval:1+2}": "a configuration computes nothing",
        "name=${hydra:runtime.output_dir}": "run_dir=DIR",
        "+optimizer._partial_=true": "leave it out",
        "tags=[' ']": "words of 1 to 64 characters",
    }.items():
        error = mistakes(*line.split(" ")) if "'" not in line else mistakes(line)
        assert words in str(error), line
        assert len(error.problems) == 1, line


def test_a_file_that_cannot_be_read_hides_no_mistake_that_is_typed(tmp_path):
    typed = mine(tmp_path, f"{HEAD}trainer: {{max_epochs: 1\n")
    found = all_mistakes(*typed, "seed=abc", "+optimizer.lrr=3")
    assert [problem.key for problem in found] == ["", "seed", "optimizer.lrr"]


def test_what_needs_no_torch_is_printed_before_torch_is_imported(capsys):
    error = ConfigError("seed", "is wrong")

    def more():
        assert "error: seed: is wrong\n" in capsys.readouterr().err
        return [ConfigError("optimizer.lrr", "is unknown").problems[0]]

    error.more = more
    assert report(error) == 2
    assert "  optimizer.lrr: is unknown\n" in capsys.readouterr().err
    script = """
import sys
from regimen.conf.errors import ConfigError
from regimen.scripts.train import train
try:
    train(["seed=abc", "+optimizer.lrr=3"])
except ConfigError as error:
    assert [problem.key for problem in error.problems] == ["seed"]
    assert "torch" not in sys.modules
    assert [problem.key for problem in error.more()] == ["optimizer.lrr"]
    print("told")
"""
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout.endswith("told\n"), done.stderr


def test_a_sweep_tells_further_mistakes_as_well():
    words = ["-m", "seed=1,2", "trainer.max_epoch=3", "+optimizer.lrr=3"]
    with pytest.raises(ConfigError, match="max_epoch") as caught:
        train(words)
    assert [problem.key for problem in caught.value.more()] == ["optimizer.lrr"]
