"""Folders of pictures and masks: the numbers of the files, in one size, or an error with a name."""

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from regimen import build
from regimen.conf.check import parse
from regimen.data.errors import DataError
from regimen.data.formats.mask_folder import mask_folder
from regimen.data.sources import fingerprint
from regimen.scripts.composition.compose import compose
from regimen.scripts.runs.plan import make_plan
from regimen.trainer.assembly.data import build_data


def _write(path, array, mode=None):
    path.parent.mkdir(parents=True, exist_ok=True)
    picture = Image.fromarray(array)
    if mode == "P":
        palette = []
        for index in range(256):
            palette += [index, 0, 255 - index]
        picture.putpalette(palette)
    if mode == "1":
        picture = picture.convert("1")
    picture.save(path)
    return path


def _numbers(seed, classes=3, size=(10, 12)):
    return np.random.RandomState(seed).randint(0, classes, size).astype(np.uint8)


@pytest.fixture
def tree(tmp_path):
    """Ten pictures for training and three for the test, with masks of three classes."""
    for split, count in (("train", 10), ("test", 3)):
        for number in range(count):
            random = np.random.RandomState(number)
            colours = random.randint(0, 256, (10, 12, 3), np.uint8)
            _write(tmp_path / split / "images" / f"{number}.jpg", colours)
            _write(tmp_path / split / "masks" / f"{number}.png", _numbers(number))
    return tmp_path


def _open(root, split="train", num_classes=3, **options):
    return mask_folder(str(root), split, num_classes, **options)


def test_masks_are_the_numbers_of_their_files(tree):
    train = _open(tree, val_fraction=0)

    assert len(train) == 10
    for index in range(len(train)):
        image, mask = train[index]
        number = int(Path(train.path(index)).stem)
        assert mask.dtype == torch.int64
        assert np.array_equal(mask.numpy(), _numbers(number))
        assert image.shape == (3, 10, 12)
        assert image.dtype == torch.uint8


@pytest.mark.parametrize(
    ("mode", "largest", "kind"),
    [
        ("L", 1, np.uint8),
        ("P", 1, np.uint8),
        ("1", 255, np.uint8),  # black and white
        ("I;16", 1, np.uint16),
    ],
)
def test_masks_of_any_plain_kind(tree, mode, largest, kind):
    expected = _numbers(7, classes=2)
    levels = (expected * largest).astype(kind)
    _write(tree / "train" / "masks" / "0.png", levels, mode)

    _, mask = _open(tree, val_fraction=0)[0]

    assert np.array_equal(mask.numpy(), expected)


@pytest.mark.parametrize(
    ("size", "height", "width"),
    [pytest.param(24, 24, 24, id="24"), pytest.param([20, 6], 20, 6, id="size1")],
)
def test_images_and_masks_are_resized_masks_by_the_nearest_pixel(tree, size, height, width):
    image, mask = _open(tree, val_fraction=0, image_size=size)[3]

    assert image.shape[1:] == (height, width)
    assert mask.shape == (height, width)
    original = Image.fromarray(_numbers(3))
    nearest = original.resize((width, height), Image.Resampling.NEAREST)
    assert np.array_equal(mask.numpy(), np.asarray(nearest))


def test_levels_of_black_and_white_alone_are_told(tree, caplog):
    _write(tree / "train" / "masks" / "0.png", _numbers(0, classes=2) * 255)

    _open(tree, num_classes=2, val_fraction=0)

    assert "0 and 255 alone, and 255 is ignored" in caplog.text


def test_values_map_levels_to_classes(tree):
    expected = _numbers(0, classes=2)
    _write(tree / "train" / "masks" / "0.png", expected * 255)

    white = _open(tree, "train", 2, val_fraction=0, values=[0, 255], ignore_index=-100)

    _, mask = white[0]
    assert np.array_equal(mask.numpy(), expected)


def test_ignored_pixels_stay(tree):
    unsure = _numbers(1)
    unsure[0] = 255
    _write(tree / "train" / "masks" / "1.png", unsure)

    _, mask = _open(tree, val_fraction=0)[1]

    assert np.array_equal(mask.numpy(), unsure)


@pytest.mark.parametrize("name", ["val", "valid", "validation"])
@pytest.mark.parametrize("layout", ["{split}/{kind}", "{kind}/{split}"])
def test_the_folders_of_a_split(tmp_path, name, layout):
    for number, split in enumerate(["train", name, "test"]):
        images = tmp_path / layout.format(split=split, kind="images")
        masks = tmp_path / layout.format(split=split, kind="masks")
        _write(images / f"{number}.png", np.zeros((4, 4, 3), np.uint8))
        _write(masks / f"{number}_mask.png", _numbers(0, size=(4, 4)))

    for number, split in enumerate(["train", "val", "test"]):
        dataset = _open(tmp_path, split, mask_suffix="_mask")
        assert len(dataset) == 1
        assert Path(dataset.path(0)).name == f"{number}.png"


def test_a_missing_val_is_cut_from_train(tree):
    train = _open(tree, "train", val_fraction=0.3)
    val = _open(tree, "val", val_fraction=0.3)

    assert len(train) == 7
    assert len(val) == 3
    assert set(train.names).isdisjoint(val.names)
    assert fingerprint(train) != fingerprint(val)


def test_a_missing_val_that_is_not_cut_is_none(tree, caplog):
    assert _open(tree, "val", val_fraction=0) is None
    assert "has no images of 'val'" in caplog.text


def test_folds_share_the_pictures_out(tree):
    names = []
    for fold in range(5):
        names.extend(_open(tree, "val", fold=fold, folds=5).names)

    every = _open(tree, val_fraction=0).names
    assert sorted(names) == sorted(every)


def without_mask(tree):
    (tree / "train/masks/4.png").unlink()


def lossy(tree):
    (tree / "train/masks/4.png").rename(tree / "train/masks/4.jpg")


def other_size(tree):
    _write(tree / "train/masks/0.png", _numbers(0, size=(9, 9)))


def unknown_value(tree):
    _write(tree / "train/masks/0.png", _numbers(0, 3) + 7)


def colours(tree):
    _write(tree / "train/masks/0.png", np.zeros((10, 12, 3), np.uint8))


def without_train(tree):
    (tree / "train").rename(tree / "training")


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (without_mask, r"1 of 10 pictures have no mask.*4\.j"),
        (lossy, "do not ke"),
        (other_size, "must be alike"),
        (unknown_value, "is none of a class"),
        (colours, r"0\.png: RGB pixels are colours"),
        (without_train, "has no folders train/images"),
    ],
)
def test_a_mistake_in_a_mask_folder_is_named(tree, change, text):
    change(tree)
    with pytest.raises(DataError, match=text):
        _open(tree, val_fraction=0)[0]


def _words(tree, *more):
    return [
        "experiment=segmentation",
        "data=mask_folder",
        f"data.root={tree}",
        "data.num_classes=3",
        "data.image_size=16",
        "loader.batch_size=4",
        "loader.num_workers=0",
        *more,
    ]


FLIP = "{_target_: regimen.data.batch_transforms.RandomHorizontalFlip, masks: true, p: 1.0}"


def test_a_flip_that_treats_masks_alike_is_deferred_to_the_batch(tree):
    config = parse(compose(_words(tree, f"transforms.train.flip={FLIP}")).config)

    dataset = build_data(config).sets["train"]

    assert list(dataset.transform.deferred)[-1] == "train.flip"


def test_a_plan_of_masks_is_made(tree, capsys):
    request = compose(_words(tree, f"transforms.train.flip={FLIP}", "model.width=4"))

    make_plan(request, build(request.config), tree / "run")

    assert "MaskFolder" in capsys.readouterr().out


def test_a_broken_mask_is_left_out_with_on_error_skip(tree, built):
    (tree / "train" / "masks" / "0.png").write_bytes(b"no picture")
    loader, *_ = built(*_words(tree, "data.on_error=skip", "data.val_fraction=0"))
    labels = [micro.batch[1] for micro in loader.epoch(0)]
    assert sum(len(part) for part in labels) == 10
    assert len(loader.skipped) == 1
