"""Data sets by name, their splits and fingerprints; downloaded ones from torchvision's files."""

import pickle
import random
import struct
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from sklearn.datasets import load_digits
from torchvision.transforms import v2

from regimen.data.errors import DataError
from regimen.data.image_folder import image_folder
from regimen.data.noise import WithNoise
from regimen.data.scenes import UNSURE, DigitScenes
from regimen.data.sources import Cifar10, Digits, FashionMnist, _digits, fingerprint
from regimen.data.splits import fold_of, stratified_split
from regimen.data.tabular import Diabetes
from regimen.data.text import ALPHABET, StandardLibraryText, docstrings
from regimen.data.transforms import Pipeline, ToFloat

SPLITS = ("train", "val", "test")
FEW = ("textwrap", "heapq", "string")  # modules that are quickly read


@given(targets=st.lists(st.integers(0, 4), min_size=1, max_size=80), wanted=st.integers(0, 40))
@example(targets=[0, 1, 2, 2, 2, 2, 2], wanted=4)
def test_cut_partitions_and_leaves_every_class_behind(targets, wanted):
    rest, part = stratified_split(targets, wanted, seed=1)
    assert sorted([*rest, *part]) == list(range(len(targets)))
    assert {targets[i] for i in rest} == set(targets)
    assert len(part) == min(wanted, len(targets) - len(set(targets)))
    one, again, other = (
        stratified_split(np.arange(60) % 4, 20, seed)[1].tolist() for seed in (1, 1, 2)
    )
    assert one == again != other
    _, tenth = stratified_split([0] * 60 + [1] * 30 + [2] * 10, 10, seed=0)
    assert np.bincount(np.repeat([0, 1, 2], [60, 30, 10])[tenth]).tolist() == [6, 3, 1]


@pytest.mark.parametrize("labelled", [True, False])
def test_folds_share_all_samples_out(labelled):
    targets = np.arange(50) % 3 if labelled else None
    folds = [fold_of(50, k, 5, 7, targets) for k in range(5)]
    assert sorted(i for _, part in folds for i in part) == list(range(50))
    for rest, part in folds:
        assert sorted([*rest, *part]) == list(range(50))
        assert len(part) == 10
        if targets is not None:
            assert set(np.bincount(targets[part])) <= {3, 4}
    assert not np.array_equal(fold_of(50, 0, 5, 8, targets)[1], folds[0][1])
    for few, text in (([0, 0], "5 is more than the 2"), ([0, 0, 1, 1], "no class has so many")):
        with pytest.raises(DataError, match=f"data.folds=.*{text}"):
            fold_of(len(few), 0, 5 if len(few) < 4 else 3, 0, few)


def test_digits_are_scikit_learns_split_once_and_for_all():
    for ours, theirs in zip(_digits(), load_digits(return_X_y=True), strict=True):
        assert np.array_equal(ours, theirs)
        assert ours.dtype == theirs.dtype
    splits = {name: Digits(name, image_size=8) for name in SPLITS}
    assert [len(split) for split in splits.values()] == [1257, 270, 270]
    rows = [row.tobytes() for split in splits.values() for row in split.inputs.numpy()]
    assert len(set(rows)) == 1797
    assert all(len(split.targets.unique()) == 10 for split in splits.values())
    assert splits["test"].targets[:12].tolist() == [9, 9, 2, 1, 2, 6, 1, 7, 9, 8, 4, 0]
    image, target = Digits("val", image_size=16)[3]
    assert (image.shape, image.dtype, type(target)) == ((1, 16, 16), torch.uint8, int)
    assert image.max() > 200
    random_step = Pipeline({"flip": v2.RandomHorizontalFlip(), "to_float": ToFloat()})
    assert Digits("val", transform=random_step).batch([1, 2]) is None  # one by one, each keyed
    with pytest.raises(DataError, match="image_size=-3: give a side of at least one pixel"):
        Digits("train", image_size=-3)


def _write_cifar(folder):
    folder.mkdir(parents=True)
    draw = np.random.RandomState(0)
    labels = [i % 10 for i in range(20)]
    for name in [*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"]:
        content = {"data": draw.randint(0, 256, (20, 3072), np.uint8), "labels": labels}
        (folder / name).write_bytes(pickle.dumps(content))
    names = {"label_names": [f"class{i}" for i in range(10)]}
    (folder / "batches.meta").write_bytes(pickle.dumps(names))


def _write_fashion(folder):
    folder.mkdir(parents=True)
    for name, count in (("train", 60), ("t10k", 20)):
        images = np.random.RandomState(count).randint(0, 256, (count, 28, 28), np.uint8)
        labels = (np.arange(count) % 10).astype(np.uint8)
        for kind, array in (("images-idx3", images), ("labels-idx1", labels)):
            head = struct.pack(f">HBB{array.ndim}I", 0, 8, array.ndim, *array.shape)
            (folder / f"{name}-{kind}-ubyte").write_bytes(head + array.tobytes())


def test_cifar10_from_files(tmp_path, monkeypatch):
    # torchvision knows the checksums of the real files.
    monkeypatch.setattr("torchvision.datasets.CIFAR10._check_integrity", lambda self: True)
    monkeypatch.setattr("torchvision.datasets.cifar.check_integrity", lambda *_: True)
    _write_cifar(tmp_path / "cifar-10-batches-py")
    train, val = (Cifar10(str(tmp_path), split, val_size=30) for split in ("train", "val"))
    test = Cifar10(str(tmp_path), "test", image_size=16)
    raw = Cifar10(str(tmp_path), "test")
    assert (len(train), len(val), len(test)) == (70, 30, 20)
    assert val.targets.bincount().tolist() == [3] * 10
    assert (train.inputs.shape[1:], test.inputs.shape[1:]) == ((3, 32, 32), (3, 16, 16))
    assert train.classes[3] == "class3"
    stored = pickle.loads((tmp_path / "cifar-10-batches-py" / "test_batch").read_bytes())
    assert np.array_equal(raw.inputs[2].numpy().reshape(-1), stored["data"][2])
    with pytest.raises(DataError, match=r"data\.val=null"):
        Cifar10(str(tmp_path), "val", val_size=0)


def test_fashion_mnist_from_files(tmp_path):
    _write_fashion(tmp_path / "FashionMNIST" / "raw")
    train = FashionMnist(str(tmp_path), "train", val_size=20)
    assert (len(train), len(FashionMnist(str(tmp_path), "test"))) == (40, 20)
    assert train[0][0].shape == (1, 28, 28)
    assert train.classes[1] == "Trouser"
    with pytest.raises(DataError, match=r"data\.root=.*absent.*download=true"):
        FashionMnist(str(tmp_path / "absent"), "train", download=False)


def test_a_scene_its_mask_and_its_labels_agree():
    before = (torch.get_rng_state(), random.getstate(), np.random.get_state()[1].copy())
    scenes, labels = (DigitScenes("val", kind, image_size=16) for kind in ("mask", "present"))
    assert torch.equal(before[0], torch.get_rng_state())
    assert before[1] == random.getstate()
    assert np.array_equal(before[2], np.random.get_state()[1])
    assert torch.equal(scenes.inputs, labels.inputs)
    for index in range(0, len(scenes), 30):
        image, mask = scenes[index]
        assert image.shape == (1, 16, 16)
        ink = image[0] >= 96
        assert torch.equal((mask > 0) & (mask != UNSURE), ink)
        assert torch.equal(mask == UNSURE, (image[0] >= 32) & ~ink)
        numbers = set(mask.unique().tolist()) - {0, UNSURE}
        assert {int(i) + 1 for i in labels[index][1].nonzero()} == numbers
    assert 1 <= labels.targets.sum(1).min() <= labels.targets.sum(1).max() <= 3
    other = DigitScenes("val", "mask", image_size=16, split_seed=1)
    assert not torch.equal(scenes.inputs, other.inputs)
    for wrong in ({"image_size": 15}, {"most": 5}):
        with pytest.raises(DataError, match="even, and 1 to 4"):
            DigitScenes("val", **{"image_size": 16, **wrong})


def test_the_table_is_split_once_and_standardised_by_its_training_part():
    parts = [Diabetes(split) for split in SPLITS]
    train = parts[0]
    assert all(torch.equal(*pair) for pair in zip(train.tensors(), train[:], strict=True))
    assert [len(part) for part in parts] == [310, 66, 66]
    rows = torch.cat([part.inputs for part in parts])
    assert len(rows.unique(dim=0)) == 442
    torch.testing.assert_close(train.inputs.mean(0), torch.zeros(10), atol=1e-5, rtol=0)
    torch.testing.assert_close(train.targets.std(), torch.tensor(1.0))
    assert abs(parts[1].targets.mean()) > 1e-3


def text(split="train", **options):
    return StandardLibraryText(split, **{"context": 16, "modules": FEW, **options})


def test_text_is_read_and_what_follows_follows():
    dataset = text()
    tokens, following = dataset[2]
    assert torch.equal(tokens[1:], following[:-1])
    assert torch.equal(torch.cat([dataset[1][0], dataset[2][0]]), dataset.tokens[16:48])
    assert {ALPHABET[t] for t in dataset.tokens} <= set(dataset.classes)
    with pytest.raises(DataError, match="no source"):
        docstrings("no_such_module")
    with pytest.raises(DataError, match="context=100000"):
        text("val", context=100_000)


def test_no_string_is_in_two_splits():
    whole = {split: "".join(ALPHABET[t] for t in text(split).tokens) for split in SPLITS}
    everything = [s for module in FEW for s in docstrings(module)]
    homes = [[split for split in SPLITS if s in whole[split]] for s in everything if len(s) > 60]
    assert all(len(found) == 1 for found in homes)
    shifted = text(shift=True)
    drawn = []
    for seed in (0, 0, 1):  # of the sample's own key
        torch.manual_seed(seed)
        drawn.append(torch.stack([shifted[i][0] for i in range(20)]))
    assert torch.equal(drawn[0], drawn[1])
    assert not torch.equal(drawn[0], drawn[2])


def test_noise_comes_with_the_image_alone():
    dataset = WithNoise([(torch.ones(1, 4, 4), 3)], latent_dim=5, transform=lambda image: image * 2)
    torch.manual_seed(0)
    image, noise = dataset[0]
    torch.manual_seed(0)
    assert torch.equal(noise, torch.randn(5))
    assert image.unique().tolist() == [2.0]


class _Reads:
    """A wrapped data set, which must not be read for a fingerprint."""

    def __len__(self):
        return 3

    def __getitem__(self, index):
        raise AssertionError("read")

    def __array__(self, *form):
        raise AssertionError("read")


class _Holding:
    def __init__(self, value, attribute="targets"):
        setattr(self, attribute, value)

    def __len__(self):
        return 3


def _boxes(last=3.0):
    return [torch.zeros(2, 4), torch.zeros(0, 4), torch.full((1, 4), last)]


HELD = {
    "tokens": ([[1, 2], [3], []], [[1, 2], [4], []]),
    "boxes": (_boxes(), _boxes(4.0)),
    "arrays": ([np.zeros(2), np.zeros(3)], [np.zeros(2), np.ones(3)]),
    "dicts": ([{"boxes": _boxes()}], [{"boxes": _boxes(4.0)}]),
    "objects": (np.array([[1], [2, 3]], object), np.array([[1], [2, 4]], object)),
    "bfloat16": (torch.ones(3, dtype=torch.bfloat16), torch.zeros(3, dtype=torch.bfloat16)),
    "trained": (torch.ones(3, requires_grad=True), torch.zeros(3, requires_grad=True)),
    "sparse": (torch.eye(3).to_sparse(), torch.eye(4).to_sparse()),
    "surrogates": (["a", "\udc80"], ["a", "\udc81"]),
    "long-texts": (["a" * 2**23, "b", "c"], ["a" * 2**23, "b", "d"]),
    "mapping": ({"cat": 0, "dog": 1}, {"cat": 1, "dog": 0}),
    "wrapped": (_Reads(), [_Reads()]),
}


@pytest.mark.parametrize("attribute", ["classes", "targets", "inputs", "images", "names"])
@pytest.mark.parametrize(("value", "other"), HELD.values(), ids=HELD)
def test_whatever_a_data_set_holds_has_a_fingerprint(value, other, attribute):
    found = [fingerprint(_Holding(held, attribute)) for held in (value, value, other)]
    assert found[0] == found[1] != found[2]


@pytest.mark.parametrize(
    "made",
    [
        pytest.param(lambda: Path("a"), id="a path"),
        pytest.param(lambda: [Path("a"), Path("b")], id="paths"),
        pytest.param(lambda: [(Path("a"), 1), (Path("b"), 2)], id="pairs with paths"),
        pytest.param(lambda: [(Path("a"), _Reads())], id="pairs with objects"),
        pytest.param(lambda: np.array([Path("a"), object()], object), id="an array of objects"),
    ],
)
def test_a_fingerprint_holds_no_addresses(made):
    """They are others in each process, so that the data would always seem to have changed."""
    kept = [made() for _ in range(3)]
    assert len({fingerprint(_Holding(value)) for value in kept}) == 1


def test_a_fingerprint_is_no_reason_to_fail_nor_to_read_a_file_whole(tmp_path, caplog):
    class Failing(_Holding):
        def fingerprint(self):
            raise KeyError("no table")

    class Endless(_Holding):
        def __len__(self):
            raise TypeError("a stream")

    assert fingerprint(Failing([1])) == fingerprint(Failing([1])) != fingerprint(Failing([2]))
    assert "Failing.fingerprint() failed: KeyError: 'no table'" in caplog.text
    assert fingerprint(Endless([1])) != fingerprint(Endless([2]))
    round_itself = []
    round_itself.append(round_itself)
    assert len(fingerprint(_Holding(round_itself))) == 16
    mapped = np.memmap(tmp_path / "large", np.uint8, "w+", shape=2**26)
    before = fingerprint(_Holding(mapped))
    mapped[2**25] = 1  # in the middle
    assert fingerprint(_Holding(mapped)) == before
    mapped[-1] = 1
    assert fingerprint(_Holding(mapped)) != before


def test_the_fingerprints_of_manifests_stay():
    """They were written down: a resume compares those of tables."""
    known = {
        "numbers": ([3, 1, 2], "836ffc63e82d173b"),
        "texts": (["cat", "dog"], "7a4389ab7ebc8194"),
        "paths": ([Path("a/b.png")], "d0a7580fcd39bec7"),
        "tensor": (torch.arange(6.0).view(2, 3), "2f0fb19e7ffcfb66"),
        "nested": ([[1, 2], [3, 4]], "cf78c62af7887a0a"),
    }
    found = {name: fingerprint(_Holding(value)) for name, (value, _) in known.items()}
    assert found == {name: digest for name, (_, digest) in known.items()}


def test_fingerprints_tell_data_apart(picture_tree):
    def of_folder():
        return fingerprint(image_folder(str(picture_tree), "train"))

    class Own:
        def fingerprint(self):
            return "version 3"

    digits = fingerprint(Digits("val"))
    assert digits == fingerprint(Digits("val"))
    changed = Digits("val")
    changed.inputs[3, 0, 2, 2] += 1
    others = [Digits("test"), Digits("val", image_size=8), Digits("val", split_seed=1), changed]
    assert len({digits, *map(fingerprint, [*others, [1, 2]])}) == 6
    assert fingerprint(Own()) == "version 3"
    before = of_folder()
    assert before == of_folder()
    (picture_tree / "train" / "cat" / "00.jpg").rename(picture_tree / "train" / "cat" / "zz.jpg")
    assert before != of_folder()
