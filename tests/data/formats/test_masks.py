"""Folders of pictures and masks: the numbers of the files, in one size, or an error with a name."""

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
        picture.putpalette([value for index in range(256) for value in (index, 0, 255 - index)])
    (picture.convert(mode) if mode == "1" else picture).save(path)
    return path


def _numbers(seed, classes=3, size=(10, 12)):
    return np.random.RandomState(seed).randint(0, classes, size).astype(np.uint8)


@pytest.fixture
def tree(tmp_path):
    """Ten pictures for training and three for the test, with masks of three classes."""
    for split, count in (("train", 10), ("test", 3)):
        for number in range(count):
            colours = np.random.RandomState(number).randint(0, 256, (10, 12, 3), np.uint8)
            _write(tmp_path / split / "images" / f"{number}.jpg", colours)
            _write(tmp_path / split / "masks" / f"{number}.png", _numbers(number))
    return tmp_path


def _open(root, split="train", num_classes=3, **options):
    return mask_folder(str(root), split, num_classes, **options)


def test_masks_are_the_numbers_of_their_files(tree):
    train = _open(tree, val_fraction=0)
    for index in range(len(train)):
        image, mask = train[index]
        number = int(train.path(index).split("/")[-1].removesuffix(".jpg"))
        assert mask.dtype == torch.int64
        assert np.array_equal(mask.numpy(), _numbers(number))
        assert (image.shape, image.dtype) == ((3, 10, 12), torch.uint8)


@pytest.mark.parametrize("mode", ["L", "P", "1", "I;16"])
def test_masks_of_any_plain_kind(tree, mode):
    expected = _numbers(7, classes=2)
    array = expected * 255 if mode == "1" else expected
    array = array.astype(np.uint16) if mode == "I;16" else array
    _write(tree / "train" / "masks" / "0.png", array, mode)
    assert np.array_equal(_open(tree, val_fraction=0)[0][1].numpy(), expected)


@pytest.mark.parametrize("size", [24, [20, 6]])
def test_images_and_masks_are_resized_masks_by_the_nearest_pixel(tree, size):
    image, mask = _open(tree, val_fraction=0, image_size=size)[3]
    height, width = (size, size) if isinstance(size, int) else size
    assert image.shape[1:] == mask.shape == (height, width)
    nearest = Image.fromarray(_numbers(3)).resize((width, height), Image.Resampling.NEAREST)
    assert np.array_equal(mask.numpy(), np.asarray(nearest))


def test_values_map_levels_to_classes_and_ignored_pixels_stay(tree, caplog):
    _write(tree / "train" / "masks" / "0.png", _numbers(0, classes=2) * 255)
    _open(tree, num_classes=2, val_fraction=0)
    assert "0 and 255 alone, and 255 is ignored" in caplog.text
    white = _open(tree, "train", 2, val_fraction=0, values=[0, 255], ignore_index=-100)
    assert np.array_equal(white[0][1].numpy(), _numbers(0, classes=2))
    unsure = _numbers(1)
    unsure[0] = 255
    _write(tree / "train" / "masks" / "1.png", unsure)
    assert np.array_equal(_open(tree, val_fraction=0)[1][1].numpy(), unsure)


@pytest.mark.parametrize("name", ["val", "valid", "validation"])
@pytest.mark.parametrize("layout", ["split-first", "kind-first"])
def test_the_folders_of_a_split(tmp_path, name, layout, tree):
    split = (lambda n, k: f"{n}/{k}") if layout == "split-first" else (lambda n, k: f"{k}/{n}")
    root = tmp_path / "other"
    for number, folder in enumerate(["train", name, "test"]):
        picture = np.zeros((4, 4, 3), np.uint8)
        _write(root / split(folder, "images") / f"{number}.png", picture)
        _write(root / split(folder, "masks") / f"{number}_mask.png", _numbers(0, size=(4, 4)))
    found = [_open(root, kind, mask_suffix="_mask") for kind in ("train", "val", "test")]
    assert [dataset.path(0)[-5:] for dataset in found] == ["0.png", "1.png", "2.png"]
    assert [len(dataset) for dataset in found] == [1, 1, 1]


def test_a_missing_val_is_cut_and_folds_partition(tree, caplog):
    train, val = (_open(tree, split, val_fraction=0.3) for split in ("train", "val"))
    assert (len(train), len(val)) == (7, 3)
    assert not {*train.names} & {*val.names}
    assert fingerprint(train) != fingerprint(val)
    assert _open(tree, "val", val_fraction=0) is None
    assert "has no images of 'val'" in caplog.text
    parts = [_open(tree, "val", fold=fold, folds=5) for fold in range(5)]
    assert sorted(name for part in parts for name in part.names) == sorted(
        _open(tree, val_fraction=0).names
    )


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (
            lambda tree: (tree / "train/masks/4.png").unlink(),
            r"1 of 10 pictures have no mask.*4\.j",
        ),
        (lambda tree: (tree / "train/masks/4.png").rename(tree / "train/masks/4.jpg"), "do not ke"),
        (
            lambda tree: _write(tree / "train/masks/0.png", _numbers(0, size=(9, 9))),
            "must be alike",
        ),
        (lambda tree: _write(tree / "train/masks/0.png", _numbers(0, 3) + 7), "is none of a class"),
        (
            lambda tree: _write(tree / "train/masks/0.png", np.zeros((10, 12, 3), np.uint8)),
            r"0\.png: RGB pixels are colours",
        ),
        (lambda tree: (tree / "train").rename(tree / "training"), "has no folders train/images"),
    ],
    ids=["no-mask", "lossy", "sizes", "unknown-value", "colours", "no-train"],
)
def test_a_mistake_in_a_mask_folder_is_named(tree, change, text):
    change(tree)
    with pytest.raises(DataError, match=text):
        _open(tree, val_fraction=0)[0]


def _words(tree, *more):
    data = ["data=mask_folder", f"data.root={tree}", "data.num_classes=3", "data.image_size=16"]
    return ["experiment=segmentation", *data, "loader.batch_size=4", "loader.num_workers=0", *more]


def test_flips_treat_masks_alike_and_a_plan_is_made(tree, capsys):
    flip = "{_target_: regimen.data.batch_transforms.RandomHorizontalFlip, masks: true, p: 1.0}"
    config = parse(compose(_words(tree, f"transforms.train.flip={flip}")).config)
    dataset = build_data(config).sets["train"]
    assert list(dataset.transform.deferred)[-1] == "train.flip"
    request = compose(_words(tree, f"transforms.train.flip={flip}", "model.width=4"))
    make_plan(request, build(request.config), tree / "run")
    assert "MaskFolder" in capsys.readouterr().out


def test_a_broken_mask_is_left_out_with_on_error_skip(tree, built):
    (tree / "train" / "masks" / "0.png").write_bytes(b"no picture")
    loader, *_ = built(*_words(tree, "data.on_error=skip", "data.val_fraction=0"))
    labels = [micro.batch[1] for micro in loader.epoch(0)]
    assert sum(len(part) for part in labels) == 10
    assert len(loader.skipped) == 1
