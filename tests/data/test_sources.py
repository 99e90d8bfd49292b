"""The named data sets; the downloaded ones from files laid out as torchvision leaves them."""

import gzip
import pickle
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from data.errors import DataError
from data.sources import Cifar10, Digits, FashionMnist, _digits
from data.transforms import Pipeline, Standardize, ToFloat


def test_digits_are_split_once_and_for_all() -> None:
    splits = {name: Digits(name, image_size=8) for name in ("train", "val", "test")}
    assert [len(split) for split in splits.values()] == [1257, 270, 270]
    rows = [row.tobytes() for split in splits.values() for row in split.images.numpy()]
    assert len(set(rows)) == 1797
    assert all(len(split.targets.unique()) == 10 for split in splits.values())
    assert splits["test"].targets[:12].tolist() == [9, 9, 2, 1, 2, 6, 1, 7, 9, 8, 4, 0]


def test_digits_are_enlarged_once() -> None:
    digits = Digits("val", image_size=16)
    image, target = digits[3]
    assert (image.shape, image.dtype) == ((1, 16, 16), torch.uint8)
    assert digits.classes[target] == str(target)
    assert image.max() > 200


def test_whole_batches_are_the_samples_to_the_bit() -> None:
    pipeline = Pipeline({"to_float": ToFloat(), "normalize": Standardize([0.3], [0.32])})
    digits = Digits("val", transform=pipeline)
    batch = digits.batch([5, 0, 9])
    assert batch is not None
    assert torch.equal(batch[0], torch.stack([digits[i][0] for i in (5, 0, 9)]))
    assert batch[1].tolist() == [digits[i][1] for i in (5, 0, 9)]


def test_random_transforms_are_never_applied_to_whole_batches() -> None:
    from torchvision.transforms import v2

    pipeline = Pipeline({"flip": v2.RandomHorizontalFlip(), "to_float": ToFloat()})
    assert Digits("val", transform=pipeline).batch([1, 2]) is None


def _write_cifar(root: Path) -> None:
    folder = root / "cifar-10-batches-py"
    folder.mkdir(parents=True)
    draw = np.random.RandomState(0)
    for name in [*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"]:
        pixels = draw.randint(0, 256, (20, 3072), np.uint8)
        content = {"data": pixels, "labels": [i % 10 for i in range(20)]}
        (folder / name).write_bytes(pickle.dumps(content))
    names = {"label_names": [f"class{i}" for i in range(10)]}
    (folder / "batches.meta").write_bytes(pickle.dumps(names))


def _write_fashion(root: Path) -> None:
    folder = root / "FashionMNIST" / "raw"
    folder.mkdir(parents=True)
    for name, count in (("train", 60), ("t10k", 20)):
        images = np.random.RandomState(count).randint(0, 256, (count, 28, 28), np.uint8)
        labels = (np.arange(count) % 10).astype(np.uint8)
        for kind, array in (("images-idx3", images), ("labels-idx1", labels)):
            head = struct.pack(f">HBB{array.ndim}I", 0, 8, array.ndim, *array.shape)
            path = folder / f"{name}-{kind}-ubyte"
            path.write_bytes(head + array.tobytes())
            with gzip.open(f"{path}.gz", "wb") as packed:
                packed.write(head + array.tobytes())


@pytest.fixture
def unchecked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let torchvision take our small files for the real ones, whose checksums it knows."""
    monkeypatch.setattr("torchvision.datasets.CIFAR10._check_integrity", lambda self: True)
    monkeypatch.setattr("torchvision.datasets.cifar.check_integrity", lambda *_: True)


@pytest.mark.usefixtures("unchecked")
def test_cifar10_from_files(tmp_path: Path) -> None:
    _write_cifar(tmp_path)
    train, val = (Cifar10(str(tmp_path), split, val_size=30) for split in ("train", "val"))
    test = Cifar10(str(tmp_path), "test", image_size=16)
    assert (len(train), len(val), len(test)) == (70, 30, 20)
    assert val.targets.bincount().tolist() == [3] * 10
    assert (train.images.shape[1:], test.images.shape[1:]) == ((3, 32, 32), (3, 16, 16))
    assert train.classes[3] == "class3"
    stored = pickle.loads((tmp_path / "cifar-10-batches-py" / "test_batch").read_bytes())
    raw = Cifar10(str(tmp_path), "test")
    assert np.array_equal(raw.images[2].numpy().reshape(-1), stored["data"][2])


def test_fashion_mnist_from_files(tmp_path: Path) -> None:
    _write_fashion(tmp_path)
    train = FashionMnist(str(tmp_path), "train", val_size=20)
    test = FashionMnist(str(tmp_path), "test")
    assert (len(train), len(test)) == (40, 20)
    assert train[0][0].shape == (1, 28, 28)
    assert train.classes[1] == "Trouser"


@pytest.mark.parametrize("kind", [Cifar10, FashionMnist])
def test_absent_files_name_the_root_and_the_way_out(tmp_path: Path, kind: Any) -> None:
    with pytest.raises(DataError, match=r"data\.root=.*absent.*download=true"):
        kind(str(tmp_path / "absent"), "train", download=False)


@pytest.mark.usefixtures("unchecked")
def test_no_val_images_says_what_to_set(tmp_path: Path) -> None:
    _write_cifar(tmp_path)
    with pytest.raises(DataError, match=r"data\.val=null"):
        Cifar10(str(tmp_path), "val", val_size=0)


def test_digits_are_those_of_scikit_learn() -> None:
    from sklearn.datasets import load_digits

    for ours, theirs in zip(_digits(), load_digits(return_X_y=True), strict=True):
        assert np.array_equal(ours, theirs)
        assert ours.dtype == theirs.dtype


def test_a_size_below_a_pixel_is_refused() -> None:
    with pytest.raises(DataError, match="image_size=-3: give a side of at least one pixel"):
        Digits("train", image_size=-3)
