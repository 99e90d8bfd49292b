"""The folder of a run by its name: below the root, wherever the name points."""

import pytest

from trainer.runs.directory import name_folder
from trainer.runs.status import RunDirectoryError


@pytest.mark.parametrize(
    "name",
    ["", "..", "../x", "a/../../x", "/abs", "a//b", "a/./b", "x\0y", "x" * 300, "é" * 150, "a/"],
)
def test_a_name_that_leads_elsewhere_is_refused(tmp_path, name):
    with pytest.raises(RunDirectoryError, match="name: ") as caught:
        name_folder(tmp_path / "runs", name)
    assert caught.value.exit_code == 2
    assert "\n" not in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def test_a_link_out_of_the_root_is_refused(tmp_path):
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "out").symlink_to(tmp_path)
    with pytest.raises(RunDirectoryError, match="leads out"):
        name_folder(tmp_path / "runs", "out")


@pytest.mark.parametrize("name", ["a", "a/b", "ä b", "a..b", "..a", "2026"])
def test_a_plain_name_is_taken(tmp_path, name):
    assert name_folder(tmp_path, name) == tmp_path / name
