"""`regimen tensorboard --logdir DIR`: under which names TensorBoard finds runs."""

import os
from pathlib import Path

import pytest

from conf.errors import ConfigError
from scripts.serving.tensorboard import named, tensorboard


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """Two runs of one experiment, one of another, and a sweep of two jobs."""
    folder = tmp_path / "runs"
    for name in ("net/1", "net/2", "old/net/1", "net/sweeps/3/0", "net/sweeps/3/1"):
        (folder / name / "tensorboard").mkdir(parents=True)
        (folder / name / "tensorboard" / "events.out.tfevents.0").touch()
    sweep = folder / "net/sweeps/3"
    (sweep / "sweep.json").write_text('{"swept": ["optimizer.lr"]}')
    (sweep / "tensorboard").mkdir()
    for number, lr in enumerate(("0.1", "0.2")):
        (sweep / "tensorboard" / f"lr={lr}").symlink_to(f"../{number}/tensorboard")
    return folder


def names(logdir: Path) -> set[str]:
    """Return the runs that TensorBoard, which follows links, names."""
    walked = os.walk(logdir, followlinks=True)
    return {str(Path(path).relative_to(logdir)) for path, _, files in walked if files}


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        pytest.param(["net/1"], {"net/1"}, id="a run"),
        pytest.param(["net/1", "net/2"], {"net/1", "net/2"}, id="two runs"),
        pytest.param(["net/sweeps/3"], {"lr=0.1", "lr=0.2"}, id="a sweep"),
        pytest.param(["net/sweeps/3/1"], {"3/1"}, id="a job"),
        pytest.param(
            ["."],
            {"net/1", "net/2", "old/net/1", "net/sweeps/3/lr=0.1", "net/sweeps/3/lr=0.2"},
            id="all runs of a folder",
        ),
    ],
)
def test_runs_have_their_own_names(
    runs: Path, tmp_path: Path, given: list[str], expected: set[str]
) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    assert names(named([runs / name for name in given], empty)) == expected


def test_runs_of_one_name_are_told_apart(runs: Path, tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    found = names(named([runs / "net/1", runs / "old/net/1"], empty))
    assert found == {"net/1", str((runs / "old/net/1").relative_to("/"))}


def test_a_sweeps_own_folder_is_shown_so_that_later_jobs_are_seen(runs: Path) -> None:
    assert named([runs / "net/sweeps/3"], Path("unused")) == runs / "net/sweeps/3/tensorboard"


def test_traces_are_where_the_profile_tab_looks(runs: Path, tmp_path: Path) -> None:
    session = runs / "net/1/tensorboard/plugins/profile/step-00000012"
    session.mkdir(parents=True)
    (session / "host.xplane.pb").touch()
    empty = tmp_path / "empty"
    empty.mkdir()
    named([runs / "net/1"], empty)
    assert (empty / "plugins/profile/net_1_step-00000012/host.xplane.pb").exists()


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        pytest.param([], "--logdir: missing", id="nothing"),
        pytest.param(["--logdir", "nowhere"], r"nowhere holds no tensorboard/", id="no run"),
    ],
)
def test_a_mistake_is_told(argv: list[str], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        tensorboard(argv)
