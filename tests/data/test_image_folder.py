"""Folders of images: what is found, what is cut, and what is refused."""

import logging
from pathlib import Path
from typing import Any

import pytest

from data.errors import DataError
from data.image_folder import Pictures, find_pictures, image_folder
from data.loading.loader import Loader
from data.orders import Sequential
from data.updates import UpdateSampler


def _open(root: Path, split: Any = "train", **options: Any) -> Any:
    return image_folder(str(root), split, **options)


def test_missing_val_is_cut_from_train_by_the_rule(picture_tree: Path) -> None:
    train, val = (_open(picture_tree, s, val_fraction=0.25) for s in ("train", "val"))
    assert (len(train), len(val)) == (12, 4)
    files = [[split.path(i) for i in range(len(split))] for split in (train, val)]
    assert not set(files[0]) & set(files[1])
    assert val.targets.bincount().tolist() == [3, 1]
    assert train.classes == val.classes == ["cat", "dog"]
    again = _open(picture_tree, "val", val_fraction=0.25)
    assert [again.path(i) for i in range(4)] == files[1]


def test_val_folder_is_taken_as_it_is(picture_tree: Path, write_image: Any) -> None:
    for name in ("cat", "dog"):
        write_image(picture_tree / "val" / name / "x.png")
    assert len(_open(picture_tree, "val")) == 2
    assert len(_open(picture_tree, "train")) == 16


def test_absent_test_is_none_and_reported(
    picture_tree: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for path in sorted((picture_tree / "test").rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()
    (picture_tree / "test").rmdir()
    with caplog.at_level(logging.WARNING):
        assert _open(picture_tree, "test") is None
        assert _open(picture_tree, "val", val_fraction=0.0) is None
    assert "has no folder 'test'" in caplog.text
    assert len(_open(picture_tree, "train", val_fraction=0.0)) == 16


def test_sample_is_image_and_class(picture_tree: Path) -> None:
    train = _open(picture_tree, transform=lambda image: image.float())
    image, target = train[len(train) - 1]
    assert image.shape == (3, 10, 12)
    assert target == 1
    assert "/dog/" in train.path(len(train) - 1)


def test_hidden_nested_and_foreign_files(
    picture_tree: Path, write_image: Any, caplog: pytest.LogCaptureFixture
) -> None:
    cats = picture_tree / "train" / "cat"
    write_image(cats / ".ipynb_checkpoints" / "copy.jpg")
    write_image(picture_tree / "train" / ".ipynb_checkpoints" / "copy.jpg")
    write_image(cats / "deep" / "er" / "one.PNG")
    (cats / "notes.txt").write_text("not an image")
    (cats / "loop").symlink_to(cats, target_is_directory=True)
    with caplog.at_level(logging.WARNING):
        train = _open(picture_tree, val_fraction=0.0)
    assert train.classes == ["cat", "dog"]
    assert len(train) == 17
    assert "ignored 1 files" in caplog.text
    assert "notes.txt" in caplog.text


def test_dangling_link_is_a_sample_that_fails_by_name(picture_tree: Path) -> None:
    (picture_tree / "train" / "cat" / "aa.jpg").symlink_to("nowhere.jpg")
    train = _open(picture_tree, val_fraction=0.0)
    broken = [i for i in range(len(train)) if train.path(i).endswith("aa.jpg")]
    loader = Loader(train, UpdateSampler(Sequential(len(train)), batch_size=4), seed=0)
    with pytest.raises(DataError, match=rf"sample {broken[0]}: cannot read .*aa\.jpg.*=skip"):
        list(loader.epoch(0))


def _remove(root: Path, *names: str) -> None:
    for name in names:
        for path in sorted((root / name).rglob("*"), reverse=True):
            path.rmdir() if path.is_dir() else path.unlink()
        (root / name).rmdir()


@pytest.mark.parametrize(
    ("damage", "text"),
    [
        pytest.param(lambda r: _remove(r, "train"), "has no folder 'train'", id="no-train"),
        pytest.param(lambda r: _remove(r, "train/cat", "train/dog"), "no class folders", id="none"),
        pytest.param(
            lambda r: (r / "train" / "eel").mkdir(), "eel holds no images", id="empty-class"
        ),
        pytest.param(
            lambda r: _remove(r, "test/dog"), "differ: test lacks dog", id="test-lacks-class"
        ),
        pytest.param(
            lambda r: (r / "test" / "eel").mkdir(), "test has eel that train", id="test-has-more"
        ),
        pytest.param(
            lambda r: [(r / "train" / name).mkdir() for name in ("caf\u00e9", "cafe\u0301")],
            "look the same",
            id="unicode-forms",
        ),
    ],
)
def test_damaged_tree_names_the_key_and_the_fault(
    picture_tree: Path, damage: Any, text: str
) -> None:
    damage(picture_tree)
    with pytest.raises(DataError, match=text) as caught:
        [_open(picture_tree, split) for split in ("train", "val", "test")]
    assert "data.root" in str(caught.value)


def test_missing_root_names_the_key(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"data\.root=.*nowhere is no folder"):
        _open(tmp_path / "nowhere")


def test_one_image_a_class_cannot_give_a_val_split(tmp_path: Path, write_image: Any) -> None:
    write_image(tmp_path / "train" / "cat" / "1.jpg")
    with pytest.raises(DataError, match="too few samples to cut a val"):
        _open(tmp_path, "val")


def test_a_link_in_a_circle_is_a_sample_that_fails_by_name(picture_tree: Path) -> None:
    cats = picture_tree / "train" / "cat"
    (cats / "circle.jpg").symlink_to("circle.jpg")
    train = _open(picture_tree, val_fraction=0.0)
    index = [train.path(i).endswith("circle.jpg") for i in range(len(train))].index(True)
    with pytest.raises(DataError, match=r"cannot read .*circle\.jpg"):
        train[index]


def test_pictures_are_samples_without_classes(picture_tree: Path) -> None:
    names = find_pictures(str(picture_tree / "test"))
    files = Pictures(names, 3, [6, 5], transform=lambda image: image.float())
    assert len(files) == 4
    assert files[0].shape == files.stand_in().shape == (3, 6, 5)
    assert files.path(0) == str(picture_tree / "test/cat/00.jpg")
    assert find_pictures(str(picture_tree / "test/*/01.jpg")) == [files.path(1), files.path(3)]
    assert find_pictures("-", [f"{files.path(2)}\n", "\n"]) == [files.path(2)]
    for source, words in (("nowhere", "names no picture"), ("-", "no file name came")):
        with pytest.raises(DataError, match=words):
            find_pictures(source)
