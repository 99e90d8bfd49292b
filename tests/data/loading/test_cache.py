"""Decoded images that are kept: the same ones, whole or absent, within a size."""

import logging
import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch

from data.decode import read_image
from data.errors import UnreadableError
from data.image_folder import ImageFolder, image_folder
from data.loading.cache import ImageCache

KINDS = ["ram", "disk"]


def _open(tree: Path, kind: Any, most_bytes: int = 10**6) -> ImageFolder:
    files = image_folder(str(tree), "train", val_fraction=0)
    assert files is not None
    files.cache = ImageCache(kind, tree / ".cache", most_bytes)
    return files


def _filled(tree: Path, kind: Any, most_bytes: int = 10**6) -> ImageFolder:
    files = _open(tree, kind, most_bytes)
    files.fill_cache(lambda: False)
    return files


def _kept(tree: Path) -> list[Path]:
    return sorted((tree / ".cache").glob("*.images"))


@pytest.mark.parametrize("kind", KINDS)
def test_images_of_any_size_are_those_of_the_files(
    picture_tree: Path, write_image: Any, kind: str
) -> None:
    write_image(picture_tree / "train" / "cat" / "wide.png", size=(19, 7))
    files = _filled(picture_tree, kind)
    for index in range(len(files)):
        assert torch.equal(files[index][0], read_image(files.path(index)))
    images, targets = files.batch([3, 1, 12])
    assert torch.equal(images, torch.stack([files[i][0] for i in (3, 1, 12)]))
    assert targets.tolist() == [0, 0, 1]
    assert files.batch([0, 10]) is None  # of two sizes


@pytest.mark.parametrize("kind", KINDS)
def test_files_are_read_once_and_workers_share_them(picture_tree: Path, kind: str) -> None:
    files = _filled(picture_tree, kind)
    expected = files[2][0].clone()
    files[2][0].zero_()  # a transform may write to its image
    for path in (picture_tree / "train").rglob("*.jpg"):
        path.unlink()
    sent = pickle.loads(pickle.dumps(files))
    assert torch.equal(files[2][0], expected)
    assert torch.equal(sent[2][0], expected)


@pytest.mark.parametrize("kind", KINDS)
def test_broken_images_fail_as_without_a_cache(picture_tree: Path, kind: str) -> None:
    (picture_tree / "train" / "cat" / "03.jpg").write_bytes(b"no image")
    files = _filled(picture_tree, kind)
    with pytest.raises(UnreadableError, match=r"03\.jpg"):
        files[3]
    assert files.batch([2, 3]) is None
    assert torch.equal(files[4][0], read_image(files.path(4)))


@pytest.mark.parametrize("kind", KINDS)
def test_more_than_the_bound_is_not_kept(
    picture_tree: Path, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        files = _filled(picture_tree, kind, most_bytes=1000)
    assert "more than data.cache_bytes=1000" in caplog.text
    assert files.batch([0]) is None
    assert files[0][0].shape == (3, 10, 12)
    assert not list((picture_tree / ".cache").glob("*.images")) + _parts(picture_tree)


def _parts(tree: Path) -> list[Path]:
    return list((tree / ".cache").glob("*.part"))


def test_a_second_run_finds_the_file_and_another_content_another(picture_tree: Path) -> None:
    _filled(picture_tree, "disk")
    (path,) = _kept(picture_tree)
    before = path.stat().st_ino
    _filled(picture_tree, "disk")
    assert [kept.stat().st_ino for kept in _kept(picture_tree)] == [before]
    os.utime(picture_tree / "train" / "cat" / "00.jpg", ns=(1, 1))
    _filled(picture_tree, "disk")
    assert len(_kept(picture_tree)) == 2


def test_a_torn_file_is_made_again(picture_tree: Path) -> None:
    _filled(picture_tree, "disk")
    (path,) = _kept(picture_tree)
    path.write_bytes(path.read_bytes()[:-100])
    files = _filled(picture_tree, "disk")
    assert torch.equal(files[5][0], read_image(files.path(5)))
    assert files.batch([5]) is not None


def test_the_oldest_files_make_room(picture_tree: Path) -> None:
    size = 16 * (3 * 12 * 10 + 16)
    for number in (1, 2, 3):
        os.utime(picture_tree / "train" / "cat" / "00.jpg", ns=(number, number))
        _filled(picture_tree, "disk", most_bytes=2 * size)
    assert len(_kept(picture_tree)) == 2


@pytest.mark.parametrize("kind", KINDS)
def test_an_interruption_leaves_nothing_and_the_next_call_begins_anew(
    picture_tree: Path, kind: str
) -> None:
    files = _open(picture_tree, kind)
    files.fill_cache(lambda: True)
    assert files.batch([0]) is None
    assert not _kept(picture_tree) + _parts(picture_tree)
    files.fill_cache(lambda: False)
    assert files.batch([0]) is not None


def test_a_folder_that_cannot_be_written_costs_speed_only(
    picture_tree: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (picture_tree / ".cache").write_text("a file in the way")
    with caplog.at_level(logging.WARNING):
        files = _filled(picture_tree, "disk")
    assert "data.cache=disk: the decoded images cannot be written" in caplog.text
    assert files[0][0].shape == (3, 10, 12)
