"""Folders of images: what is found, what is cut, and what is refused."""

import logging
from shutil import rmtree

import pytest

from data.errors import DataError
from data.image_folder import Pictures, find_pictures, image_folder
from toy_batches import batches


def _open(root, split="train", **options):
    return image_folder(str(root), split, **options)


def test_missing_val_is_cut_from_train_by_the_rule(picture_tree):
    train, val = (_open(picture_tree, s, val_fraction=0.25) for s in ("train", "val"))
    assert (len(train), len(val)) == (12, 4)
    files = [[split.path(i) for i in range(len(split))] for split in (train, val)]
    assert not set(files[0]) & set(files[1])
    assert val.targets.bincount().tolist() == [3, 1]
    assert train.classes == val.classes == ["cat", "dog"]
    again = _open(picture_tree, "val", val_fraction=0.25)
    assert [again.path(i) for i in range(4)] == files[1]
    image, target = _open(picture_tree, transform=lambda image: image.float())[-1]
    assert (image.shape, target) == ((3, 10, 12), 1)


def test_splits_that_are_there_are_taken_and_absent_ones_reported(
    picture_tree, write_image, caplog
):
    rmtree(picture_tree / "test")
    with caplog.at_level(logging.WARNING):
        assert _open(picture_tree, "test") is None
        assert _open(picture_tree, "val", val_fraction=0.0) is None
    assert "has no folder 'test'" in caplog.text
    for name in ("cat", "dog"):
        write_image(picture_tree / "val" / name / "x.png")
    assert [len(_open(picture_tree, split)) for split in ("train", "val")] == [16, 2]


def test_hidden_nested_and_foreign_files(picture_tree, write_image, caplog):
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


@pytest.mark.parametrize("end", ["nowhere.jpg", "aa.jpg"])
def test_dangling_link_is_a_sample_that_fails_by_name(picture_tree, end):
    (picture_tree / "train" / "cat" / "aa.jpg").symlink_to(end)
    train = _open(picture_tree, val_fraction=0.0)
    broken = [i for i in range(len(train)) if train.path(i).endswith("aa.jpg")]
    with pytest.raises(DataError, match=rf"sample {broken[0]}: cannot read .*aa\.jpg.*=skip"):
        batches(train)


TWINS = ("train/caf\u00e9", "train/cafe\u0301")


@pytest.mark.parametrize(
    ("removed", "made", "text"),
    [
        (["."], [], "it is no folder"),
        (["train"], [], "has no folder 'train'"),
        (["train/cat", "train/dog"], [], "no class folders"),
        ([], ["train/eel"], "eel holds no images"),
        (["test/dog"], [], "test and of train differ: one has dog"),
        ([], ["test/eel"], "one has eel"),
        ([], TWINS, "look the same"),
    ],
)
def test_damaged_tree_names_the_key_and_the_fault(picture_tree, removed, made, text):
    for name in removed:
        rmtree(picture_tree / name)
    for name in made:
        (picture_tree / name).mkdir()
    with pytest.raises(DataError, match=text) as caught:
        [_open(picture_tree, split) for split in ("train", "val", "test")]
    assert "data.root" in str(caught.value)


def test_one_image_a_class_cannot_give_a_val_split(tmp_path, write_image):
    write_image(tmp_path / "train" / "cat" / "1.jpg")
    with pytest.raises(DataError, match="too few samples to cut a val"):
        _open(tmp_path, "val")


def test_pictures_are_samples_without_classes(picture_tree):
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
