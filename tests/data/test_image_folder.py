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


def paths_of(dataset):
    return [dataset.path(index) for index in range(len(dataset))]


def folders_of(dataset):
    """Return the name of the folder of each sample, which is its class."""
    return [path.split("/")[-2] for path in paths_of(dataset)]


def place_of(dataset, name):
    """Return the index of the sample whose path ends so."""
    (place,) = [index for index, path in enumerate(paths_of(dataset)) if path.endswith(name)]
    return place


def test_missing_val_is_cut_from_train_by_the_rule(picture_tree):
    train = _open(picture_tree, "train", val_fraction=0.25)
    val = _open(picture_tree, "val", val_fraction=0.25)

    assert len(train) == 12
    assert len(val) == 4
    assert set(paths_of(train)).isdisjoint(paths_of(val))
    assert val.targets.bincount().tolist() == [3, 1]
    assert train.classes == val.classes == ["cat", "dog"]
    again = _open(picture_tree, "val", val_fraction=0.25)
    assert paths_of(again) == paths_of(val)


def test_a_sample_is_a_transformed_picture_and_its_class(picture_tree):
    train = _open(picture_tree, transform=lambda image: image.float())

    image, target = train[-1]

    assert image.shape == (3, 10, 12)
    assert image.dtype == torch.float32
    assert target == 1


def test_splits_that_are_absent_are_reported(picture_tree, caplog):
    rmtree(picture_tree / "test")

    with caplog.at_level(logging.WARNING):
        assert _open(picture_tree, "test") is None
        assert _open(picture_tree, "val", val_fraction=0.0) is None

    assert "has no folder 'test'" in caplog.text


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


def test_a_val_that_is_there_is_not_cut(picture_tree, write_image):
    for name in ("cat", "dog"):
        write_image(picture_tree / "val" / name / "x.png")

    assert len(_open(picture_tree, "train")) == 16
    assert len(_open(picture_tree, "val")) == 2


@pytest.mark.parametrize("end", ["nowhere.jpg", "aa.jpg"])
def test_dangling_link_is_a_sample_that_fails_by_name(picture_tree, end):
    (picture_tree / "train" / "cat" / "aa.jpg").symlink_to(end)
    train = _open(picture_tree, val_fraction=0.0)
    broken = place_of(train, "aa.jpg")

    with pytest.raises(DataError, match=rf"sample {broken}: cannot read .*aa\.jpg.*=skip"):
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
    cats = picture_tree / split / "cat"
    rmtree(cats)
    if fault != "missing":
        cats.mkdir()
    if fault == "other-files":
        (cats / "notes.txt").write_text("none yet")

    found = _open(picture_tree, split)

    assert found.classes == ["cat", "dog", "eel"]
    names = [found.classes[label] for label in found.targets]
    assert names == folders_of(found)
    assert set(names) == {"dog", "eel"}
    assert f"{split} has no images of 1 of train's classes: cat" in caplog.text


@pytest.mark.parametrize("name", ["val", "valid", "validation"])
def test_the_folder_of_val_may_have_either_name(picture_tree, write_image, name, caplog):
    path = write_image(picture_tree / name / "cat" / "x.png")

    train = _open(picture_tree)
    val = _open(picture_tree, "val")

    assert len(train) == 16
    assert paths_of(val) == [str(path)]
    assert "not used" not in caplog.text


@pytest.mark.parametrize(
    ("made", "folds", "named"),
    [
        (["held_out"], 0, "held_out"),
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


@pytest.fixture
def deep_tree(tmp_path, write_image):
    """Pictures of a detector of 12 bits in files of 16, among photographs."""
    scans = tmp_path / "train" / "scan"
    scans.mkdir(parents=True)
    for number in range(5):
        Image.fromarray(TWELVE_BITS).save(scans / f"{number}.png")
    for number in range(3):
        write_image(tmp_path / "train" / "photo" / f"{number}.png")
        write_image(tmp_path / "train" / "photo" / f"{number}.jpg")
    return tmp_path


TWELVE_BITS = np.arange(4096).astype(np.uint16).reshape(64, 64)
SCAN = "scan/0.png"


def test_deep_greys_are_counted(deep_tree):
    """16 of the detector's 4,096 levels are left without a range."""
    plain = _open(deep_tree, channels=1, val_fraction=0)

    image, _ = plain[place_of(plain, SCAN)]
    assert len(image.unique()) == 16
    assert plain.explain_depth() == [
        "5 files of 11 hold 16-bit greys, none above 4095: as 8 bits 16 levels of them are left, "
        "and with data.range=[0,4095] 256"
    ]


def test_deep_greys_keep_their_levels_with_a_range(deep_tree):
    ranged = _open(deep_tree, channels=1, val_fraction=0, value_range=[0, 4095])

    image, _ = ranged[place_of(ranged, SCAN)]
    expected = (TWELVE_BITS >> 4).astype(np.uint8)
    assert torch.equal(image[0], torch.from_numpy(expected))
    assert "becomes 256 levels" in ranged.explain_depth()[0]
    assert ranged.input_form()["range"] == [0, 4095]


def test_one_image_a_class_cannot_give_a_val_split(tmp_path, write_image):
    write_image(tmp_path / "train" / "cat" / "1.jpg")
    with pytest.raises(DataError, match="too few samples to cut a val"):
        _open(tmp_path, "val")


def test_greys_beyond_a_range_are_counted(deep_tree):
    short = _open(deep_tree, channels=1, val_fraction=0, value_range=[0, 1023])

    assert "values up to 4095 are cut off" in short.explain_depth()[0]


@pytest.mark.parametrize("kind", ["ram", "disk"])
@pytest.mark.parametrize("limits", [None, [0, 4095]], ids=str)
def test_deep_greys_are_the_same_from_a_cache(deep_tree, kind, limits):
    files = _open(deep_tree, channels=1, val_fraction=0, value_range=limits)
    place = place_of(files, SCAN)
    expected, _ = files[place]

    files.cache = ImageCache(kind, deep_tree / ".cache", 10**7)
    files.fill_cache(lambda: False)

    image, _ = files[place]
    assert torch.equal(image, expected)


def test_pictures_are_samples_without_classes(picture_tree):
    names = find_pictures(str(picture_tree / "test"))

    files = Pictures(names, 3, [6, 5], transform=lambda image: image.float())

    assert len(files) == 4
    assert files[0].shape == files.stand_in().shape == (3, 6, 5)
    assert files.path(0) == str(picture_tree / "test/cat/00.jpg")


def test_pictures_are_found_in_a_folder_by_a_pattern_or_in_a_list(picture_tree):
    every = find_pictures(str(picture_tree / "test"))

    by_pattern = find_pictures(str(picture_tree / "test/*/01.jpg"))
    of_list = find_pictures("-", [f"{every[2]}\n", "\n"])

    assert by_pattern == [every[1], every[3]]
    assert of_list == [every[2]]


@pytest.mark.parametrize(
    ("source", "words"), [("nowhere", "names no picture"), ("-", "no file name came")]
)
def test_a_source_without_pictures_is_refused(source, words):
    with pytest.raises(DataError, match=words):
        find_pictures(source)


def test_a_pipe_is_a_sample_that_fails_by_name(picture_tree):
    os.mkfifo(picture_tree / "train" / "cat" / "pipe.jpg")
    dataset = _open(picture_tree, val_fraction=0)

    with pytest.raises(DataError, match=r"pipe\.jpg: it is not a regular file"):
        dataset[place_of(dataset, "pipe.jpg")]

    dataset.explain_depth()


@pytest.fixture
def other_test(tmp_path, write_image):
    """A folder with dogs and birds for a test, and no `train`."""
    root = tmp_path / "other"
    for name in ("dog", "bird"):
        write_image(root / "test" / name / "0.jpg")
    return root


def config_of(picture_tree, other_test):
    words = ["experiment=resnet18", "data=image_folder", f"data.root={picture_tree}"]
    return parse(compose([*words, f"data.test.root={other_test}"]).config)


def test_a_test_set_without_train_follows_the_names_of_the_run(picture_tree, other_test):
    names = ["bird", "cat", "dog"]

    dataset = build_data(config_of(picture_tree, other_test), ("test",), names).sets["test"]

    assert dataset.classes == names
    assert folders_of(dataset) == ["bird", "dog"]
    assert dataset.targets.tolist() == [0, 2]


def test_a_test_set_without_train_follows_the_names_of_train(picture_tree, other_test):
    config = config_of(picture_tree, other_test)
    with pytest.raises(ClassNamesError, match="'bird' among them"):
        build_data(config)  # a training on cats and dogs

    rmtree(other_test / "test" / "bird")
    dataset = build_data(config).sets["test"]

    assert dataset.targets.tolist() == [1]
    with pytest.raises(DataError, match="has no folder 'train'"):
        _open(other_test, "val")
