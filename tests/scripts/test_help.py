"""What asks for information instead of a run: help, configurations, completions, schemas, docs."""

import json
import re
import runpy
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path

import hydra
import pytest
import yaml
from jsonschema import Draft7Validator

from regimen.conf.errors import ConfigError
from regimen.conf.fields import declared
from regimen.conf.interpolation import join
from regimen.conf.layout import ROOT
from regimen.conf.schema import Config
from regimen.scripts.cli.arguments import parse_arguments
from regimen.scripts.commands import COMMANDS
from regimen.scripts.composition.compose import compose
from regimen.scripts.composition.folders import CONF
from regimen.scripts.help import (
    _SCRIPTS,
    _written,
    answer,
    completion,
    completions,
    description,
    schema_keys,
)
from regimen.scripts.schema import schema, schema_text

TABLE = yaml.safe_load((ROOT / "tests/mistakes.yaml").read_text())
FILES = sorted(CONF.rglob("*.yaml"))


@pytest.fixture(autouse=True)
def _here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for run in ("net/now", "a;touch b/now"):
        Path("runs", run).mkdir(parents=True)
        Path("runs", run, "manifest.json").write_text("{}")
    for name in ("experiment/mine", "model/resnet_mine"):
        file = Path("mine", f"{name}.yaml")
        file.parent.mkdir(parents=True)
        file.write_text(
            "# train experiment=mine\n# @package _global_\n# What I am after.\nname: mine\n"
        )


def every_key(schema, section=""):
    for name, key in declared(schema).items():
        yield join(section, name), key
        if key.inner_schema is not None:
            yield from every_key(key.inner_schema, join(section, name))


def printed(capsys, *argv):
    answer(parse_arguments(list(argv)))
    return capsys.readouterr().out


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.relative_to(CONF).as_posix())
def test_what_a_file_is_for_is_no_command(path):
    if path.parent != CONF:
        assert re.match(r"(?!(uv|pip|train|python) )\S", description(path))


def test_help_lists_every_group_with_its_choices_and_what_experiments_are(capsys):
    text = printed(capsys, "--help", "--config-dir", "mine")
    words = set(re.split(r"[\s,:]+", text))
    groups = {path.parent.relative_to(CONF).as_posix() for path in CONF.rglob("*.yaml")} - {"."}
    assert groups - {"experiment"} <= words
    assert {path.stem for path in CONF.rglob("*/*.yaml")} <= words
    for path in (CONF / "experiment").glob("*.yaml"):
        assert re.search(rf"^  {path.stem} +\w", text, re.M)
    assert "What I am after." in text
    assert "--config-dir" in text


def test_help_of_a_group_shows_choices_and_keys_with_their_meanings(capsys):
    text = " ".join(printed(capsys, "--help", "optimizer").split())
    assert "optimizer=CHOICE:" in text
    assert "adamw AdamW: Adam with decoupled weight decay." in text
    assert "optimizer.betas=[0.9, 0.999] how long the averages of gradients" in text
    assert "optimizer.lr_decay=0.0 update t uses" in text  # of one choice alone
    assert "[adagrad]" in text
    assert "optimizer/param_groups=CHOICE:" in text
    assert "callbacks.ema" not in text
    text = " ".join(printed(capsys, "--help", "trainer.precision", "loader").split())
    assert text.startswith("trainer.precision=fp32 bf16 and fp16 are autocast;")
    assert "one of fp32, tf32, bf16" in text
    assert "trainer.max_epochs" not in text
    assert "loader.batch_size" in text


def test_help_and_a_configuration_need_no_torch():
    code = "import sys; from regimen import compose; from regimen.scripts.train import train;"
    code += "train(['--help']); compose(['experiment=resnet18']); sys.exit('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], timeout=60, stdout=subprocess.DEVNULL)
    assert done.returncode == 0


def test_the_config_of_a_job(capsys):
    whole = printed(capsys, "--cfg", "job", "loader.batch_size=3", "data=image_folder")
    assert "batch_size: 3" in whole
    assert "${data.num_classes}" in whole
    assert "root: ???" in whole  # though a run could not begin
    assert "num_classes: 10" in printed(capsys, "--cfg", "job", "--resolve", "-p", "model")
    assert printed(capsys, "--cfg", "job", "-p", "model.dropout", "model.dropout=0.25") == "0.25\n"
    assert f"Hydra {hydra.__version__}" in printed(capsys, "--version")
    assert "name: train" in printed(capsys, "--cfg", "hydra", "-p", "hydra.job")
    assert "max_epochs: 7" in printed(capsys, "--cfg", "all", "trainer.max_epochs=7")
    assert printed(capsys, "-sc", "install=bash") == _SCRIPTS["bash"]


@pytest.mark.parametrize(("line", "message"), TABLE["questions"])
def test_a_question_that_has_no_answer(capsys, line, message):
    with pytest.raises(ConfigError, match=message):
        answer(parse_arguments(line.split()))
    assert ("lrr: 1" in capsys.readouterr().out) is (message == "lrr")  # before the mistakes


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        pytest.param("regimen tr", ["train"], id="command"),
        pytest.param("regimen ", list(COMMANDS), id="every command"),
        pytest.param("train mod", ["model="], id="group"),
        pytest.param("train model=resnet1", ["resnet18"], id="choice"),
        pytest.param("regimen train task/loss=cross", ["cross_entropy"], id="inner group"),
        pytest.param("train trainer.max_ep", ["trainer.max_epochs="], id="key"),
        pytest.param("train dry", ["dry_run="], id="key at the root"),
        pytest.param("evaluate run=runs", ["runs/net/now"], id="run"),
        pytest.param("train resume='", ["'runs/a;touch b/now'"], id="no command of the shell"),
        pytest.param("train -cd mine model=resnet_", ["resnet_mine"], id="the user's"),
        pytest.param("train nothing", [], id="nothing"),
    ],
)
def test_what_a_word_can_become(line, expected):
    assert completions(line) == expected


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_zsh_and_fish_get_whole_words(shell, capsys):
    for line in ("train model=resnet5", "train trainer.max_ep", "regimen ru"):
        completion([shell, "--line", line])
    assert capsys.readouterr().out == "model=resnet50\ntrainer.max_epochs=\nruns\n"


SHELLS = {  # how each asks for what completes `train model=resnet`
    "bash": """
compopt() { :; }
regimen() { PYTHON -P -m regimen.scripts.commands "$@"; }
SCRIPT
COMP_LINE='train model=resnet' COMP_POINT=18
_regimen_complete
printf 'model=%s\\n' "${COMPREPLY[@]}"
""",
    "zsh": """
regimen() { PYTHON -P -m regimen.scripts.commands "$@" }
compdef() { :; }
compadd() { print -r -- "${@[$@[(i)--]+1,-1]}" }
SCRIPT
words=(train model=resnet) CURRENT=2
_regimen_complete
""",
    "fish": """
function regimen; PYTHON -P -m regimen.scripts.commands $argv; end
SCRIPT
complete -C "train model=resnet"
""",
}


@pytest.mark.parametrize("shell", SHELLS)
def test_a_shell_takes_its_script(shell, capsys):
    if shutil.which(shell) is None:
        pytest.skip(f"there is no {shell} here")
    completion([shell])
    code = SHELLS[shell].replace("SCRIPT", capsys.readouterr().out)
    code = code.replace("PYTHON", f"'{sys.executable}'")
    done = subprocess.run([shell, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.stdout.split() == ["model=resnet18", "model=resnet34", "model=resnet50"]
    assert done.stderr == ""


def test_the_site_has_a_row_for_every_key_and_no_page_writes_one_by_hand():
    hooks = runpy.run_path(str(ROOT / "docs/hooks.py"))
    page = (ROOT / "docs/configuration.md").read_text(encoding="utf-8")
    assert page.count(hooks["MARK"]) == 1
    assert not re.search(r"^\| `(trainer|loader)\.", page, re.M)
    rows = dict(re.findall(r"^\| `([\w.]+)` \|(.*)\|$", hooks["on_page_markdown"](page), re.M))
    assert set(Config.__dataclass_fields__) <= rows.keys()
    assert {"optimizer.lr", "loader.eval.timeout", "trainer.compile.regions"} <= rows.keys()
    for line in schema_keys(Config):
        words = re.findall(r"[\w.]+", f"{line.value} {line.meaning}")
        assert set(words) <= set(re.findall(r"[\w.]+", rows[line.name])), line
    assert "(dp only)" in rows["strategy.dim"]
    assert "(not with LBFGS)" in rows["trainer.clip_grad_norm"]
    assert "(fp16 not with LBFGS)" in rows["trainer.precision"]
    assert rows["trainer.max_time"].endswith("may change ")
    assert rows["trainer.max_steps"].endswith("|  ")
    assert hooks["on_page_markdown"]("# Another page") == "# Another page"


OF_THE_DATA = ("data.root", "data.num_classes", "data.cache_dir")  # what they are for these data


def test_the_comment_of_a_default_in_a_file_begins_with_the_meaning_in_the_schema():
    declarations = dict(every_key(Config))
    wrong = {}
    for path in FILES:
        group = path.parent.relative_to(CONF).as_posix()
        if group in ("experiment", "debug"):
            continue
        for line in _written(path, "" if group == "." else group.replace("/", ".")):
            name = line.name.removeprefix(".")
            key = declarations.get(name)
            if key is None or name in OF_THE_DATA or not (line.value and line.meaning):
                continue
            if key.section is not None:  # the comment tells what the section holds
                continue
            is_default = yaml.safe_load(line.value) == key.default
            if is_default and not line.meaning.startswith(key.doc):
                wrong[f"{path.name}: {name}"] = (line.meaning, key.doc)
    assert wrong == {}


# `regimen schema`: what an editor accepts in a YAML file is what a run accepts.


@cache
def validator(group):
    found = json.loads(schema_text(group))
    Draft7Validator.check_schema(found)
    return Draft7Validator(found)


def mistakes(group, content):
    return [error.json_path for error in validator(group).iter_errors(content)]


def test_a_shipped_file_fits_its_schema():
    found = {}
    for path in FILES:
        place = path.parent.relative_to(CONF).as_posix()
        # train.yaml is a piece with any key of the root, as an experiment is.
        group = "experiment" if place == "." else place
        found[path] = mistakes(group, yaml.safe_load(path.read_text(encoding="utf-8")) or {})
    assert {path: wrong for path, wrong in found.items() if wrong} == {}


@pytest.mark.parametrize("row", TABLE["marked"], ids=str)
def test_a_mistake_is_marked(row):
    group, content, *places = row
    assert mistakes(group, content) == places


def test_the_command_prints_a_schema_or_writes_all(tmp_path, capsys):
    assert schema(["task/loss"]) == 0
    text = capsys.readouterr().out
    assert json.loads(text)["title"] == "task/loss"
    assert schema(["--write", str(tmp_path / "editor")]) == 0
    written = {path.name: path.read_text(encoding="utf-8") for path in tmp_path.rglob("*.json")}
    assert {"configuration.json", "experiment.json", "task.loss.json"} <= set(written)
    assert written["task.loss.json"] == text
    for name in ("resnet18", "gan", "char_lm"):
        assert mistakes(None, compose([f"experiment={name}"]).config) == []
    with pytest.raises(ConfigError, match="did you mean"):
        schema(["optimiser"])
