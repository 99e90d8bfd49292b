"""Folders of images: what is found, what is cut, and what is refused."""

import logging
import os
from shutil import rmtree

import numpy as np
import pytest
import torch
from PIL import Image

from regimen.conf.check import parse
from regimen.data.errors import ClassNamesError, DataError
from regimen.data.image_folder import ImageCache, Pictures, find_pictures, image_folder
from regimen.scripts.composition.compose import compose
from regimen.trainer.assembly.data import build_data
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
        (["test/dog", "test/cat"], [], "cat holds no images"),
        ([], ["test/eel"], "test has class folders that train lacks: eel"),
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


@pytest.mark.parametrize("fault", ["missing", "empty", "other-files"])
@pytest.mark.parametrize("split", ["val", "test"])
def test_a_class_that_a_split_lacks_keeps_its_number(
    picture_tree, write_image, split, fault, caplog
):
    for name in ("cat", "dog", "eel"):
        write_image(picture_tree / "train" / name / "x.png")
        write_image(picture_tree / split / name / "x.png")
    rmtree(picture_tree / split / "cat")
    if fault != "missing":
        (picture_tree / split / "cat").mkdir()
    if fault == "other-files":
        (picture_tree / split / "cat" / "notes.txt").write_text("none yet")
    found = _open(picture_tree, split)
    assert found.classes == ["cat", "dog", "eel"]
    names = [found.classes[label] for label in found.targets]
    assert names == [found.path(i).split("/")[-2] for i in range(len(found))]
    assert set(names) == {"dog", "eel"}
    assert f"{split} has no images of 1 of train's classes: cat" in caplog.text


@pytest.mark.parametrize("name", ["val", "valid", "validation"])
def test_the_folder_of_val_may_have_either_name(picture_tree, write_image, name, caplog):
    write_image(picture_tree / name / "cat" / "x.png")
    train = _open(picture_tree)
    val = _open(picture_tree, "val")
    assert len(train) == 16
    assert [val.path(i) for i in range(len(val))] == [str(picture_tree / name / "cat" / "x.png")]
    assert "not used" not in caplog.text


@pytest.mark.parametrize(
    ("made", "folds", "named"),
    [
        (["dev"], 0, "dev"),
        (["Val", "holdout", ".cache"], 0, "Val, holdout"),
        (["val", "valid"], 0, "valid"),
        (["validation"], 3, "validation"),
    ],
)
def test_folders_that_are_no_split_are_named_once(
    picture_tree, write_image, made, folds, named, caplog
):
    for name in made:
        write_image(picture_tree / name / "cat" / "x.png")
    for split in ("train", "val", "test"):
        _open(picture_tree, split, folds=folds)
    assert caplog.text.count(f"not used: {named}; splits are called train, val") == 1


def test_deep_greys_are_counted_and_keep_their_levels_with_a_range(tmp_path, write_image):
    """A detector of 12 bits in files of 16: 16 of its 4,096 levels are left without a range."""
    values = np.arange(4096).astype(np.uint16).reshape(64, 64)
    for number in range(5):
        path = tmp_path / "train" / "scan" / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(values).save(path)
    for number in range(3):
        write_image(tmp_path / "train" / "photo" / f"{number}.png")
        write_image(tmp_path / "train" / "photo" / f"{number}.jpg")
    plain = _open(tmp_path, channels=1, val_fraction=0)
    ranged = _open(tmp_path, channels=1, val_fraction=0, value_range=[0, 4095])
    deep = next(i for i in range(len(plain)) if "scan" in plain.path(i))
    assert len(plain[deep][0].unique()) == 16
    assert torch.equal(ranged[deep][0][0], torch.from_numpy((values >> 4).astype(np.uint8)))
    assert plain.explain_depth() == [
        "5 files of 11 hold 16-bit greys, none above 4095: as 8 bits 16 levels of them are left, "
        "and with data.range=[0,4095] 256"
    ]
    assert "becomes 256 levels" in ranged.explain_depth()[0]
    short = _open(tmp_path, channels=1, val_fraction=0, value_range=[0, 1023])
    assert "values up to 4095 are cut off" in short.explain_depth()[0]
    assert ranged.input_form()["range"] == [0, 4095]
    for kind in ("ram", "disk"):
        for files in (plain, ranged):
            expected = files[deep][0]
            files.cache = ImageCache(kind, tmp_path / ".cache", 10**7)
            files.fill_cache(lambda: False)
            assert torch.equal(files[deep][0], expected)
            files.cache = None


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


def test_a_pipe_is_a_sample_that_fails_by_name(picture_tree):
    os.mkfifo(picture_tree / "train" / "cat" / "pipe.jpg")
    dataset = _open(picture_tree, val_fraction=0)
    place = next(i for i in range(len(dataset)) if dataset.path(i).endswith("pipe.jpg"))
    with pytest.raises(DataError, match=r"pipe\.jpg: it is not a regular file"):
        dataset[place]
    dataset.explain_depth()


def test_a_test_set_without_train_follows_the_names_of_the_run(picture_tree, tmp_path, write_image):
    for name in ("dog", "bird"):
        write_image(tmp_path / "other" / "test" / name / "0.jpg")
    typed = ["experiment=resnet18", "data=image_folder", f"data.root={picture_tree}"]
    config = parse(compose([*typed, f"data.test.root={tmp_path / 'other'}"]).config)
    names = ["bird", "cat", "dog"]
    dataset = build_data(config, ("test",), names).sets["test"]
    assert dataset.classes == names
    assert [dataset.path(i).split("/")[-2] for i in range(2)] == ["bird", "dog"]
    assert dataset.targets.tolist() == [0, 2]
    with pytest.raises(ClassNamesError, match="'bird' among them"):
        build_data(config)  # a training on cats and dogs
    rmtree(tmp_path / "other" / "test" / "bird")
    assert build_data(config).sets["test"].targets.tolist() == [1]
    with pytest.raises(DataError, match="has no folder 'train'"):
        _open(tmp_path / "other", "val")
