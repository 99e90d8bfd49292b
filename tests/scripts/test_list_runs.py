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


def made(place, state="finished", best=None, **config):
    """Make a run's directory; `state` None: it still runs, as far as its files tell."""
    path = Path("runs") / place
    path.parent.mkdir(parents=True, exist_ok=True)
    facts = {"config_yaml": yaml.safe_dump(CONFIG | config), "facts": {}}
    directory = RunDirectory.create(path, overrides=["model=mlp", "seed=1"], **facts)
    (path / "checkpoints").mkdir(exist_ok=True)
    lines = [{"step": 5, "epoch": 1, "val/loss": 2.5}, {"step": 10, "epoch": 2, "val/loss": 2.25}]
    torn = '{"step": 15, "epo'
    (path / "metrics.jsonl").write_text("".join(json.dumps(li) + "\n" for li in lines) + torn)
    if state is not None:
        facts = {"metric": "val/loss", "value": best, "step": 5}
        results = {"val/loss": 2.0} if state == "finished" else None
        directory.finish(state, results=results, best=facts if best else None)
    directory.release()
    return path


def listed(capsys, *argv):
    assert runs([*argv, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


VALUES = [None, True, -1, 1e300, 10**30, "\ud800\x1b[0m", "x" * 10_000, [[1]], {"a": {"b": 1}}]
DEEP = "[" * 5000


@pytest.mark.parametrize("value", VALUES, ids=range(len(VALUES)))
def test_a_run_whose_files_say_anything_is_listed(capsys, value):
    made("net/a")
    path = made("net/b")
    for name, keys in {
        "status.json": ("state", "seconds", "best", "results", "code"),
        "manifest.json": ("created", "exit", "facts"),
    }.items():
        (path / name).write_text(json.dumps(dict.fromkeys(keys, value)))
    line = {"step": value, "epoch": value, "val/loss": value}
    (path / "metrics.jsonl").write_text(json.dumps(line) + "\n")
    status = {"state": "finished", "best": {"metric": value, "value": value}, "seconds": value}
    (made("net/c") / "status.json").write_text(json.dumps(status))
    for argv in ([], ["--json"], ["diff", "runs/net/a", "runs/net/b"]):
        assert runs(argv) == 0
    capsys.readouterr().out.encode()  # no lone surrogates


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
    (path / "checkpoints" / "step.pt").write_bytes(b"x" * 1000)
    size = sum(p.stat().st_size for p in path.rglob("*") if p.is_file())
    os.link(path / "checkpoints" / "step.pt", path / "checkpoints" / "last.pt")  # takes no room
    (run,) = listed(capsys)
    assert (run["run"], run["name"], run["status"]) == ("runs/net/a", "net", "finished")
    assert (run["epoch"], run["step"], run["max_epochs"]) == (2, 10, 3)
    assert (run["metric"], run["best"], run["differs"]) == ("val/loss", 0.5, {})
    assert 0 <= run["seconds"] < 600
    assert run["bytes"] == size


def test_killed_and_running_runs_are_told_apart_in_rows_of_one_line(capsys):
    assert runs([]) == 0
    assert capsys.readouterr().out == "no runs in runs\n"
    held = made("net/" + "a_long_name_" * 15, None)
    killed = made("net/killed", None)
    lock = RunLock(held)
    assert lock.acquire() is None
    assert runs([]) == 0
    header, *rows = (line.split() for line in capsys.readouterr().out.splitlines())
    lock.release()
    assert header[:2] == ["run", "status"]
    told = [[str(held), "running", "2/3"], [str(killed), "killed", "2/3"]]
    assert [row[:3] for row in rows] == told


def test_tags_are_listed_and_are_no_difference(capsys):
    made("net/a", tags=["baseline", "paper"])
    made("net/b", tags=[])
    made("net/c", tags="damaged")
    found = listed(capsys)
    assert [run["tags"] for run in found] == [["baseline", "paper"], [], []]
    assert [run["differs"] for run in found] == [{}, {}, {}]
    assert runs([]) == 0
    assert "baseline paper" in capsys.readouterr().out


def test_damaged_runs_are_listed_all_the_same(capsys):
    whole = made("net/a")
    damaged = made("net/b")
    for name in ("status.json", "manifest.json", "config.yaml", "metrics.jsonl"):
        (damaged / name).write_bytes(b"{\xff")
    (made("net/c") / "status.json").write_text('{"state": "finished", "seconds": 1e400}')
    other_types = {"state": "finished", "best": [1], "seconds": "y"}
    (made("net/d") / "status.json").write_text(json.dumps(other_types))
    found = {run["run"]: run for run in listed(capsys)}
    states = [found[f"runs/net/{name}"]["status"] for name in "abcd"]
    assert states == ["finished", "damaged", "damaged", "finished"]
    run = found[str(damaged)]
    assert (run["name"], run["epoch"], run["best"]) == ("net", None, None)
    assert (found["runs/net/d"]["best"], found["runs/net/d"]["seconds"]) == (None, 0.0)
    assert found[str(whole)]["epoch"] == 2
    assert runs([]) == 0


def test_sweeps_are_found_and_links_are_not_followed(capsys):
    path = made("net/sweeps/now/0")
    alone = made("net/now")
    (path.parent / "leaderboard.csv").write_text("")
    (Path("runs") / "latest").symlink_to(path.absolute())
    first, second = listed(capsys)
    assert (first["run"], first["sweep"]) == (str(path), str(path.parent))
    assert first["overrides"] == ["model=mlp", "seed=1"]
    assert (second["run"], second["sweep"]) == (str(alone), None)
    assert [run["run"] for run in listed(capsys, str(path))] == [str(path)]


def test_what_differs_is_among_the_runs_of_a_name(capsys):
    made("net/a")
    made("net/b", seed=1, model={"_target_": "regimen.models.mlp.MLP", "width": 9})
    made("net/c", model={"_target_": "mine.Net"})
    made("other/a", name="other", seed=7)
    differs = {run["run"].removeprefix("runs/"): run["differs"] for run in listed(capsys)}
    assert differs["other/a"] == {}
    assert differs["net/b"]["seed"] == 1
    assert differs["net/c"] == {"seed": 0, "model": {"_target_": "mine.Net"}}
    runs([])
    assert "model=mine.Net" in "".join(capsys.readouterr().out.split())


def test_two_runs_side_by_side(capsys):
    left = made("net/a", best=0.5)
    right = made("net/b", "failed", seed=False, model={"_target_": "mine.Net", "depth": None})
    runs(["diff", str(left), str(right), "--json"])
    pairs = json.loads(capsys.readouterr().out)
    model = {
        "_target_": ["regimen.models.mlp.MLP", "mine.Net"],
        "width": [8, "-"],
        "depth": ["-", None],
    }
    expected = {"seed": [0, False], **{f"model.{key}": pair for key, pair in model.items()}}
    assert pairs["config"] == expected
    assert pairs["metrics"] == {"val/loss": [2.0, 2.25]}
    assert pairs["run"]["status"] == ["finished", "failed"]
    runs(["diff", str(left), str(right)])
    assert "mine.Net" in capsys.readouterr().out
    with pytest.raises(RunDirectoryError, match="nowhere holds no run") as caught:
        runs(["diff", "nowhere", "there"])
    assert caught.value.exit_code == 2
    for argv, text in ((["diff", "a"], "required: B"), (["a", "b"], "unrecognized")):
        with pytest.raises(ConfigError, match=f"command line: .*{text}"):
            runs(argv)


def test_nothing_is_shown_of_what_a_link_leads_to(capsys):
    path = made("net/a", best=0.5)
    Path("secret.yaml").write_text("name: swordfish\npassword: swordfish\n")
    (path / "config.yaml").unlink()
    (path / "config.yaml").symlink_to(Path("secret.yaml").absolute())
    (run,) = listed(capsys)
    assert (run["status"], run["step"]) == ("damaged", None)
    assert "swordfish" not in json.dumps(run)
