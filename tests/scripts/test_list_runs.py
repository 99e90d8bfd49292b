"""`regimen runs`: what run directories hold."""

import json
import os
from pathlib import Path

import pytest
import yaml

from regimen.conf.errors import ConfigError
from regimen.scripts.list_runs import runs
from regimen.trainer.runs.directory import RunDirectory
from regimen.trainer.runs.lock import RunLock
from regimen.trainer.runs.status import RunDirectoryError

MLP = {"_target_": "regimen.models.mlp.MLP", "width": 8}
CONFIG = {"name": "net", "seed": 0, "model": MLP, "trainer": {"max_epochs": 3}}


@pytest.fixture(autouse=True)
def _here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


METRICS = """\
{"step": 5, "epoch": 1, "val/loss": 2.5}
{"step": 10, "epoch": 2, "val/loss": 2.25}
{"step": 15, "epo"""  # torn by a kill


def made(place, state="finished", best=None, **config):
    """Make a run's directory; `state` None: it still runs, as far as its files tell."""
    path = Path("runs") / place
    path.parent.mkdir(parents=True, exist_ok=True)
    text = yaml.safe_dump(CONFIG | config)
    overrides = ["model=mlp", "seed=1"]
    directory = RunDirectory.create(path, overrides=overrides, config_yaml=text, facts={})
    (path / "checkpoints").mkdir(exist_ok=True)
    (path / "metrics.jsonl").write_text(METRICS)
    if state is not None:
        results = {"val/loss": 2.0} if state == "finished" else None
        chosen = {"metric": "val/loss", "value": best, "step": 5} if best else None
        directory.finish(state, results=results, best=chosen)
    directory.release()
    return path


def write_json(path, value):
    path.write_text(json.dumps(value))


def shown(capsys, *argv):
    """Return what the command prints."""
    assert runs(list(argv)) == 0
    return capsys.readouterr().out


def listed(capsys, *argv):
    return json.loads(shown(capsys, *argv, "--json"))


VALUES = [None, True, -1, 1e300, 10**30, "\ud800\x1b[0m", "x" * 10_000, [[1]], {"a": {"b": 1}}]
DEEP = "[" * 5000


STATUS_KEYS = ("state", "seconds", "best", "results", "code")
MANIFEST_KEYS = ("created", "exit", "facts")


@pytest.mark.parametrize("value", VALUES, ids=range(len(VALUES)))
def test_a_run_whose_files_say_anything_is_listed(capsys, value):
    made("net/a")
    path = made("net/b")
    write_json(path / "status.json", dict.fromkeys(STATUS_KEYS, value))
    write_json(path / "manifest.json", dict.fromkeys(MANIFEST_KEYS, value))
    write_json(path / "metrics.jsonl", {"step": value, "epoch": value, "val/loss": value})
    status = {"state": "finished", "best": {"metric": value, "value": value}, "seconds": value}
    write_json(made("net/c") / "status.json", status)

    for argv in ([], ["--json"], ["diff", "runs/net/a", "runs/net/b"]):
        out = shown(capsys, *argv)
        out.encode()  # no lone surrogates


@pytest.mark.parametrize(
    "name", ["status.json", "manifest.json", "metrics.jsonl", "config.yaml", "overrides.yaml"]
)
@pytest.mark.parametrize(
    "content", [DEEP, DEEP + "\n", "{" * 100, "1" * 5000, "- &a [x]\n- *a", ""]
)
def test_a_damaged_file_of_one_run_hides_no_other(capsys, name, content):
    made("net/a")
    (made("net/b") / name).write_text(content)
    assert len(listed(capsys)) == 2
    assert runs(["diff", "runs/net/a", "runs/net/b"]) == 0


def test_what_a_finished_run_tells(capsys):
    path = made("net/a", best=0.5)
    checkpoint = path / "checkpoints" / "step.pt"
    checkpoint.write_bytes(b"x" * 1000)
    size = sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
    os.link(checkpoint, path / "checkpoints" / "last.pt")  # takes no room

    (run,) = listed(capsys)

    seconds = run["seconds"]
    assert 0 <= seconds < 600
    expected = {
        "run": "runs/net/a",
        "name": "net",
        "status": "finished",
        "epoch": 2,
        "step": 10,
        "max_epochs": 3,
        "metric": "val/loss",
        "best": 0.5,
        "differs": {},
        "bytes": size,
    }
    assert {key: run[key] for key in expected} == expected


def test_a_folder_without_runs_says_so(capsys):
    assert shown(capsys) == "no runs in runs\n"


def test_killed_and_running_runs_are_told_apart_in_rows_of_one_line(capsys):
    held = made("net/" + "a_long_name_" * 15, None)
    killed = made("net/killed", None)
    lock = RunLock(held)
    assert lock.acquire() is None

    out = shown(capsys)

    lock.release()
    header, *rows = [line.split() for line in out.splitlines()]
    assert header[:2] == ["run", "status"]
    first, second = rows
    assert first[:3] == [str(held), "running", "2/3"]
    assert second[:3] == [str(killed), "killed", "2/3"]


def test_tags_are_listed_and_are_no_difference(capsys):
    made("net/a", tags=["baseline", "paper"])
    made("net/b", tags=[])
    made("net/c", tags="damaged")

    found = listed(capsys)

    assert [run["tags"] for run in found] == [["baseline", "paper"], [], []]
    assert [run["differs"] for run in found] == [{}, {}, {}]
    assert "baseline paper" in shown(capsys)


def test_damaged_runs_are_listed_all_the_same(capsys):
    whole = made("net/a")
    damaged = made("net/b")
    for name in ("status.json", "manifest.json", "config.yaml", "metrics.jsonl"):
        (damaged / name).write_bytes(b"{\xff")
    endless = made("net/c")
    (endless / "status.json").write_text('{"state": "finished", "seconds": 1e400}')
    other_types = made("net/d")
    write_json(other_types / "status.json", {"state": "finished", "best": [1], "seconds": "y"})

    found = {run["run"]: run for run in listed(capsys)}

    assert found[str(whole)]["status"] == "finished"
    assert found[str(whole)]["epoch"] == 2
    assert found[str(damaged)]["status"] == "damaged"
    assert found[str(damaged)]["name"] == "net"
    assert found[str(damaged)]["epoch"] is None
    assert found[str(damaged)]["best"] is None
    assert found[str(endless)]["status"] == "damaged"
    assert found[str(other_types)]["status"] == "finished"
    assert found[str(other_types)]["best"] is None
    assert found[str(other_types)]["seconds"] == 0.0
    shown(capsys)


def test_sweeps_are_found_and_links_are_not_followed(capsys):
    path = made("net/sweeps/now/0")
    alone = made("net/now")
    sweep = path.parent
    (sweep / "leaderboard.csv").write_text("")
    (Path("runs") / "latest").symlink_to(path.absolute())

    job, run = listed(capsys)

    assert job["run"] == str(path)
    assert job["sweep"] == str(sweep)
    assert job["overrides"] == ["model=mlp", "seed=1"]
    assert run["run"] == str(alone)
    assert run["sweep"] is None
    (only,) = listed(capsys, str(path))
    assert only["run"] == str(path)


def test_what_differs_is_among_the_runs_of_a_name(capsys):
    made("net/a")
    made("net/b", seed=1, model={"_target_": "regimen.models.mlp.MLP", "width": 9})
    made("net/c", model={"_target_": "mine.Net"})
    made("other/a", name="other", seed=7)

    differs = {run["run"]: run["differs"] for run in listed(capsys)}

    assert differs["runs/other/a"] == {}
    assert differs["runs/net/b"]["seed"] == 1
    assert differs["runs/net/c"] == {"seed": 0, "model": {"_target_": "mine.Net"}}
    words = shown(capsys).split()  # a cell may be broken over two lines
    assert "model=mine.Net" in "".join(words)


def test_two_runs_side_by_side(capsys):
    left = made("net/a", best=0.5)
    right = made("net/b", "failed", seed=False, model={"_target_": "mine.Net", "depth": None})
    argv = ["diff", str(left), str(right)]

    pairs = listed(capsys, *argv)

    assert pairs["config"] == {
        "seed": [0, False],
        "model._target_": ["regimen.models.mlp.MLP", "mine.Net"],
        "model.width": [8, "-"],
        "model.depth": ["-", None],
    }
    assert pairs["metrics"] == {"val/loss": [2.0, 2.25]}
    assert pairs["run"]["status"] == ["finished", "failed"]
    assert "mine.Net" in shown(capsys, *argv)


def test_what_is_no_run_has_no_difference():
    with pytest.raises(RunDirectoryError, match="nowhere holds no run") as caught:
        runs(["diff", "nowhere", "there"])
    assert caught.value.exit_code == 2


@pytest.mark.parametrize(
    ("argv", "text"), [(["diff", "a"], "required: B"), (["a", "b"], "unrecognized")]
)
def test_a_wrong_number_of_arguments_is_refused(argv, text):
    with pytest.raises(ConfigError, match=f"command line: .*{text}"):
        runs(argv)


def test_nothing_is_shown_of_what_a_link_leads_to(capsys):
    path = made("net/a", best=0.5)
    secret = Path("secret.yaml")
    secret.write_text("name: swordfish\npassword: swordfish\n")
    (path / "config.yaml").unlink()
    (path / "config.yaml").symlink_to(secret.absolute())

    (run,) = listed(capsys)

    assert run["status"] == "damaged"
    assert run["step"] is None
    assert "swordfish" not in json.dumps(run)
