"""A name from outside is the name of a file below its folder, or refused."""

from pathlib import Path

import pytest

from regimen.trainer.files.names import ForeignNameError, path_below


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("/etc/passwd", id="absolute"),
        pytest.param("//host/share", id="a share"),
        pytest.param("..", id="the folder above"),
        pytest.param("../a", id="above"),
        pytest.param("a/../../b", id="above, inside of it"),
        pytest.param("a/..", id="the folder itself, by way of another"),
        pytest.param(".", id="the folder itself"),
        pytest.param("", id="nothing"),
        pytest.param("a//b", id="an empty part"),
        pytest.param("a/", id="an empty last part"),
        pytest.param("C:/a", id="a drive"),
        pytest.param("C:a", id="a folder of a drive"),
        pytest.param("..\\a", id="above, by a backslash"),
        pytest.param("\\a", id="absolute, by a backslash"),
        pytest.param("a\0b", id="NUL"),
        pytest.param("\ud800", id="a lone surrogate"),
        pytest.param(None, id="null"),
        pytest.param(3, id="a number"),
        pytest.param(["a"], id="a list"),
        pytest.param("out", id="a link that leads out"),
        pytest.param("out/a", id="below a link that leads out"),
        pytest.param("dangling", id="a link that leads out, to nothing"),
        pytest.param("round", id="a link that leads out by way of another"),
    ],
)
def test_a_foreign_name_that_leads_out_is_refused(name: object, tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "out").symlink_to(tmp_path)
    (folder / "dangling").symlink_to(tmp_path / "missing")
    (folder / "round").symlink_to("out")

    with pytest.raises(ForeignNameError):
        path_below(folder, name)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("a", id="a file"),
        pytest.param("a/b/c.txt", id="a file in folders"),
        pytest.param("..a", id="two dots before a letter"),
        pytest.param("a b=1,\u00fc\n", id="any letters"),
        pytest.param("\udcff", id="bytes that are no text"),
        pytest.param("inside", id="a link that stays inside"),
    ],
)
def test_a_foreign_name_below_its_folder_is_its_path(name: str, tmp_path: Path) -> None:
    linked = tmp_path / "linked"  # that the folder itself is one says nothing
    (tmp_path / "folder").mkdir()
    linked.symlink_to("folder")
    (linked / "inside").symlink_to("a")

    assert path_below(linked, name) == linked / name
