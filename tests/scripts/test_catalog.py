"""`regimen ls` lists the configs, `regimen cp` copies one, `regimen new` begins a project."""

import errno
import json
import os
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml

from regimen.conf.errors import ConfigError
from regimen.conf.layout import ROOT
from regimen.scripts.catalog import cp, ls, new, project_files
from regimen.scripts.cli.arguments import parse_arguments
from regimen.scripts.commands import COMMANDS, regimen
from regimen.scripts.composition.compose import compose, split_jobs
from regimen.scripts.composition.folders import CONF
from regimen.scripts.help import description
from regimen.trainer.errors import StorageError

TABLE = yaml.safe_load((ROOT / "tests/mistakes.yaml").read_text())
MINE = Path("conf/experiment/mine.yaml")


@pytest.fixture(autouse=True)
def _here(tmp_path, monkeypatch):
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setattr(sys, "path", [*sys.path])  # to which a --config-dir is added
    MINE.parent.mkdir(parents=True)
    MINE.write_text("# @package _global_\n# What I am after.\nname: mine\n")


def shown(capsys, *argv):
    """Return what `regimen ls` prints."""
    ls(list(argv))
    return capsys.readouterr().out


def test_every_group_and_choice_is_listed(capsys):
    listed = set()
    group = ""
    for line in shown(capsys).splitlines():
        if line.startswith(" "):
            name = line.split()[0]
            listed.add(f"{group}/{name}")
        else:
            group = line

    paths = CONF.rglob("*/*.yaml")
    assert listed == {path.relative_to(CONF).with_suffix("").as_posix() for path in paths}


def test_every_choice_has_a_description():
    for path in CONF.rglob("*/*.yaml"):
        text = description(path)
        assert text, path
        assert not text.startswith("pip "), path


def test_a_group_is_listed_with_those_inside_it(capsys):
    text = shown(capsys, "task/")

    assert re.findall(r"^\S.*", text, re.M) == ["task", "task/loss", "task/metrics"]
    assert re.search(r"^  none +No metrics beside the accuracies\.$", text, re.M)


def test_a_group_is_listed_with_the_users_files(capsys):
    text = shown(capsys, "experiment", "--config-dir", "conf")

    assert re.search(rf"^  mine +What I am after\. \({MINE}\)$", text, re.M)
    assert re.search("^  resnet18 ", text, re.M)


@pytest.mark.parametrize(
    ("source", "target", "copy"),
    [
        ("experiment/resnet18", "new/experiment/mine.yaml", "new/experiment/mine.yaml"),
        ("model/mlp.yaml", "new/model/", "new/model/mlp.yaml"),
        ("task/loss/cross_entropy", "../a/", "../a/cross_entropy.yaml"),
    ],
)
def test_a_copy_is_the_file(source, target, copy):
    Path("../a").mkdir()

    assert cp([source, target]) == 0

    shipped = (CONF / source).with_suffix(".yaml")
    assert Path(copy).read_bytes() == shipped.read_bytes()


def files_in(folder):
    return [path for path in folder.rglob("*") if path.is_file()]


@pytest.mark.parametrize(("line", "expected"), TABLE["commands"])
def test_what_is_refused_leaves_every_file_as_it_was(line, expected):
    before = MINE.read_text()

    with pytest.raises(ConfigError, match=re.escape(expected)) as caught:
        regimen(line.split())

    assert caught.value.exit_code == 2
    assert MINE.read_text() == before
    assert files_in(Path()) == [MINE]


@pytest.mark.parametrize(
    ("command", "place"),
    [
        pytest.param("cp model/mlp {}/", "../typo", id="cp beside"),
        pytest.param("cp model/mlp {}/mlp.yaml", "{tmp}/typo/model", id="cp, absolute"),
        pytest.param("cp model/mlp {}/", "out/typo", id="cp, by a link that leads out"),
        pytest.param("new {}/mine", "../typo", id="new"),
        pytest.param("schema --write {}/editor", "../typo", id="schema"),
    ],
)
def test_a_missing_folder_is_made_below_the_working_folder_only(command, place, tmp_path):
    Path("out").symlink_to("..")
    folder = place.format(tmp=tmp_path)
    words = command.format(folder).split()

    with pytest.raises(ConfigError, match=f"there is no folder {folder}; make it first"):
        regimen(words)

    assert sorted(path.name for path in tmp_path.iterdir()) == ["here"]
    Path(folder).mkdir(parents=True)
    assert regimen(words) == 0


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS])
@pytest.mark.parametrize(
    ("command", "written"),
    [
        pytest.param("cp model/mlp mlp.yaml", 0, id="cp"),
        pytest.param("new mine", 0, id="new, at once"),
        pytest.param("new mine", 3, id="new, after some files"),
        pytest.param("schema --write editor", 0, id="schema, at once"),
        pytest.param("schema --write editor", 6, id="schema, after some files"),
    ],
)
def test_a_disk_that_is_full_or_read_only_is_one_line_and_the_next_try_is_free(
    command, number, written, monkeypatch
):
    calls = []
    words = command.split()

    def failing(original):
        def call(*arguments, **options):
            calls.append(original)
            if len(calls) > written:
                raise OSError(number, os.strerror(number))
            return original(*arguments, **options)

        return call

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", failing(os.fsync))
        patch.setattr(Path, "write_text", failing(Path.write_text))
        with pytest.raises(StorageError, match=os.strerror(number).lower()) as caught:
            regimen(words)
        assert caught.value.exit_code == 7

    left = files_in(Path(words[-1]))
    if words[0] == "schema":
        for path in left:
            assert json.loads(path.read_text())  # whole, each by itself
    else:
        assert left == []
    assert regimen(words) == 0


def test_a_project_is_begun_where_a_killed_command_began_one(tmp_path):
    (tmp_path / "here/mine/.tmp-project/conf").mkdir(parents=True)
    assert new(["mine"]) == 0
    assert not Path("mine/.tmp-project").exists()
    assert Path("mine/conf/experiment/mine.yaml").is_file()


@pytest.fixture
def project(monkeypatch):
    assert new(["flowers"]) == 0
    monkeypatch.chdir("flowers")
    return Path.cwd()


def test_a_new_project_trains_at_once_and_its_tests_pass(project):
    words = ["--config-dir", "conf", "experiment=mine", "trainer.max_epochs=2", "run_dir=run"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": ""}
    options = {"env": environment, "capture_output": True, "text": True, "timeout": 300}

    for module in (["regimen.scripts.train", *words], ["pytest", "-q", "-p", "no:cacheprovider"]):
        done = subprocess.run([sys.executable, "-P", "-m", *module], **options)
        assert done.returncode == 0, done.stdout + done.stderr

    title, *epochs = (project / "run/diary.txt").read_text().splitlines()
    assert title == "mine"
    assert len(epochs) == 2


def test_the_name_of_a_project_may_hold_a_blank():
    assert new(["../a b"]) == 0


def test_the_commands_of_its_readme_are_sound(project):
    (block,) = re.findall(r"```bash\n(.*?)```", (project / "README.md").read_text(), re.DOTALL)

    for line in block.splitlines():
        runner, verb, command, *words = shlex.split(line, comments=True)
        assert [runner, verb] == ["uv", "run"]
        if command == "train" and "-m" in words:
            assert len(split_jobs(parse_arguments(words))) == 2
        elif command == "train":
            assert compose(words).config["name"] == "mine"
        elif command != "pytest":
            assert words[0] in COMMANDS


def test_it_depends_on_this_clone(project):
    facts = tomllib.loads((project / "pyproject.toml").read_text())

    assert facts["project"]["name"] == "flowers"
    source = facts["tool"]["uv"]["sources"]["torch-regimen"]
    assert (project / source["path"]).resolve() == ROOT
    assert source["editable"]
    absolute = re.compile(rf"(?<!\.\.){re.escape(str(ROOT))}")
    for path in files_in(project):  # which a team shares
        assert not absolute.search(path.read_text())


def test_its_configuration_names_the_schema_for_editors(project):
    (config,) = (project / "conf").rglob("*.yaml")

    (name,) = re.findall(r"\$schema=(.*)", config.read_text())

    schema = json.loads((config.parent / name).read_text())
    assert schema["title"] == "experiment"


@pytest.mark.parametrize(
    ("title", "name"),
    [
        pytest.param("My Flowers!", "my-flowers", id="spaces"),
        pytest.param("花", "project", id="no letters"),
        pytest.param("Regimen", "my-regimen", id="ours"),
    ],
)
def test_any_folder_gives_a_name_that_can_be_installed(title, name):
    source = {"path": '/a "quoted" \\ folder', "editable": True}
    facts = tomllib.loads(project_files(title, source)["pyproject.toml"])
    assert facts["project"]["name"] == name
    assert facts["tool"]["uv"]["sources"]["torch-regimen"] == source
