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
def test_stratified_split_partitions_and_leaves_every_class_behind(targets, wanted):
    rest, part = stratified_split(targets, wanted, seed=1)

    assert sorted([*rest, *part]) == list(range(len(targets)))
    classes = set(targets)
    assert {targets[i] for i in rest} == classes
    assert len(part) == min(wanted, len(targets) - len(classes))


def test_stratified_split_is_a_function_of_its_seed():
    targets = np.arange(60) % 4

    _, part = stratified_split(targets, 20, seed=1)
    _, again = stratified_split(targets, 20, seed=1)
    _, other = stratified_split(targets, 20, seed=2)

    assert part.tolist() == again.tolist()
    assert part.tolist() != other.tolist()


def test_stratified_split_keeps_the_fractions_of_the_classes():
    targets = [0] * 60 + [1] * 30 + [2] * 10

    _, tenth = stratified_split(targets, 10, seed=0)

    assert np.bincount(np.array(targets)[tenth]).tolist() == [6, 3, 1]


@pytest.mark.parametrize("labelled", [True, False])
def test_folds_share_all_samples_out(labelled):
    targets = None
    if labelled:
        targets = np.arange(50) % 3

    folds = [fold_of(50, k, 5, 7, targets) for k in range(5)]

    everything = np.concatenate([part for _, part in folds])
    assert sorted(everything) == list(range(50))
    for rest, part in folds:
        assert sorted([*rest, *part]) == list(range(50))
        assert len(part) == 10
        if labelled:
            assert set(np.bincount(targets[part])) <= {3, 4}
    _, part = folds[0]
    _, part_of_other_seed = fold_of(50, 0, 5, 8, targets)
    assert not np.array_equal(part_of_other_seed, part)


@pytest.mark.parametrize(
    ("targets", "folds", "text"),
    [
        pytest.param([0, 0], 5, "5 is more than the 2", id="samples"),
        pytest.param([0, 0, 1, 1], 3, "no class has so many", id="samples of a class"),
    ],
)
def test_more_folds_than_samples_are_refused(targets, folds, text):
    with pytest.raises(DataError, match=f"data.folds=.*{text}"):
        fold_of(len(targets), 0, folds, 0, targets)


def test_digits_are_those_of_scikit_learn():
    for ours, theirs in zip(_digits(), load_digits(return_X_y=True), strict=True):
        assert np.array_equal(ours, theirs)
        assert ours.dtype == theirs.dtype


def test_digits_are_split_once_and_for_all():
    splits = {name: Digits(name, image_size=8) for name in SPLITS}

    assert [len(split) for split in splits.values()] == [1257, 270, 270]
    different_rows = set()
    for split in splits.values():
        different_rows.update(row.tobytes() for row in split.inputs.numpy())
        assert len(split.targets.unique()) == 10
    assert len(different_rows) == 1797
    first_targets = splits["test"].targets[:12]
    assert first_targets.tolist() == [9, 9, 2, 1, 2, 6, 1, 7, 9, 8, 4, 0]


def test_digits_are_pictures_of_the_size_that_is_asked_for():
    image, target = Digits("val", image_size=16)[3]

    assert image.shape == (1, 16, 16)
    assert image.dtype == torch.uint8
    assert image.max() > 200
    assert type(target) is int
    with pytest.raises(DataError, match="image_size=-3: give a side of at least one pixel"):
        Digits("train", image_size=-3)


def test_digits_with_a_random_transform_are_read_one_by_one():
    """Each by its own key."""
    random_step = Pipeline({"flip": v2.RandomHorizontalFlip(), "to_float": ToFloat()})

    digits = Digits("val", transform=random_step)

    assert digits.batch([1, 2]) is None


def _write_cifar(folder):
    folder.mkdir(parents=True)
    random = np.random.RandomState(0)
    labels = [i % 10 for i in range(20)]
    names = [f"data_batch_{i}" for i in range(1, 6)]
    for name in [*names, "test_batch"]:
        pixels = random.randint(0, 256, (20, 3072), np.uint8)
        content = {"data": pixels, "labels": labels}
        (folder / name).write_bytes(pickle.dumps(content))
    meta = {"label_names": [f"class{i}" for i in range(10)]}
    (folder / "batches.meta").write_bytes(pickle.dumps(meta))


def _write_fashion(folder):
    folder.mkdir(parents=True)
    for name, count in (("train", 60), ("t10k", 20)):
        random = np.random.RandomState(count)
        images = random.randint(0, 256, (count, 28, 28), np.uint8)
        labels = (np.arange(count) % 10).astype(np.uint8)
        _write_idx(folder / f"{name}-images-idx3-ubyte", images)
        _write_idx(folder / f"{name}-labels-idx1-ubyte", labels)


def _write_idx(path, array):
    """Write bytes as MNIST's files: a code for uint8, the number of sizes, the sizes, the data."""
    head = struct.pack(f">HBB{array.ndim}I", 0, 8, array.ndim, *array.shape)
    path.write_bytes(head + array.tobytes())


@pytest.fixture
def cifar10(tmp_path, monkeypatch):
    """A folder with small files in the form of CIFAR-10."""
    # torchvision knows the checksums of the real files.
    monkeypatch.setattr("torchvision.datasets.CIFAR10._check_integrity", lambda self: True)
    monkeypatch.setattr("torchvision.datasets.cifar.check_integrity", lambda *_: True)
    _write_cifar(tmp_path / "cifar-10-batches-py")
    return tmp_path


def test_cifar10_from_files_is_cut_and_resized(cifar10):
    root = str(cifar10)

    train = Cifar10(root, "train", val_size=30)
    val = Cifar10(root, "val", val_size=30)
    test = Cifar10(root, "test", image_size=16)

    assert len(train) == 70
    assert len(val) == 30
    assert len(test) == 20
    assert val.targets.bincount().tolist() == [3] * 10
    assert train.inputs.shape[1:] == (3, 32, 32)
    assert test.inputs.shape[1:] == (3, 16, 16)
    assert train.classes[3] == "class3"
    with pytest.raises(DataError, match=r"data\.val=null"):
        Cifar10(root, "val", val_size=0)


def test_cifar10_from_files_has_their_pixels(cifar10):
    file = cifar10 / "cifar-10-batches-py" / "test_batch"
    stored = pickle.loads(file.read_bytes())

    test = Cifar10(str(cifar10), "test")

    pixels = test.inputs[2].numpy().reshape(-1)
    assert np.array_equal(pixels, stored["data"][2])


def test_fashion_mnist_from_files(tmp_path):
    _write_fashion(tmp_path / "FashionMNIST" / "raw")

    train = FashionMnist(str(tmp_path), "train", val_size=20)
    test = FashionMnist(str(tmp_path), "test")

    assert len(train) == 40
    assert len(test) == 20
    image, _ = train[0]
    assert image.shape == (1, 28, 28)
    assert train.classes[1] == "Trouser"
    with pytest.raises(DataError, match=r"data\.root=.*absent.*download=true"):
        FashionMnist(str(tmp_path / "absent"), "train", download=False)


def test_a_scene_its_mask_and_its_labels_agree():
    scenes = DigitScenes("val", "mask", image_size=16)
    labels = DigitScenes("val", "present", image_size=16)

    assert torch.equal(scenes.inputs, labels.inputs)
    for index in range(0, len(scenes), 30):
        image, mask = scenes[index]
        _, present = labels[index]
        assert image.shape == (1, 16, 16)
        ink = image[0] >= 96
        edge = (image[0] >= 32) & ~ink
        assert torch.equal((mask > 0) & (mask != UNSURE), ink)
        assert torch.equal(mask == UNSURE, edge)
        # In the mask 0 is the background, and a digit d is d + 1.
        in_mask = set(mask.unique().tolist()) - {0, UNSURE}
        digits = present.nonzero().flatten() + 1
        assert set(digits.tolist()) == in_mask
    digits_of_scene = labels.targets.sum(1)
    assert 1 <= digits_of_scene.min() <= digits_of_scene.max() <= 3


def test_scenes_draw_from_no_generator_of_the_training():
    torch_state = torch.get_rng_state()
    python_state = random.getstate()
    numpy_state = np.random.get_state()[1].copy()

    DigitScenes("val", "mask", image_size=16)

    assert torch.equal(torch_state, torch.get_rng_state())
    assert python_state == random.getstate()
    assert np.array_equal(numpy_state, np.random.get_state()[1])


def test_scenes_of_another_split_seed_are_others():
    scenes = DigitScenes("val", "mask", image_size=16)
    other = DigitScenes("val", "mask", image_size=16, split_seed=1)

    assert not torch.equal(scenes.inputs, other.inputs)


@pytest.mark.parametrize("wrong", [{"image_size": 15}, {"most": 5}], ids=str)
def test_scenes_of_an_impossible_form_are_refused(wrong):
    options = {"image_size": 16, **wrong}
    with pytest.raises(DataError, match="even, and 1 to 4"):
        DigitScenes("val", **options)


def test_the_table_is_split_once_and_standardised_by_its_training_part():
    parts = [Diabetes(split) for split in SPLITS]

    train, val, _ = parts
    assert [len(part) for part in parts] == [310, 66, 66]
    rows = torch.cat([part.inputs for part in parts])
    assert len(rows.unique(dim=0)) == 442
    torch.testing.assert_close(train.inputs.mean(0), torch.zeros(10), atol=1e-5, rtol=0)
    torch.testing.assert_close(train.targets.std(), torch.tensor(1.0))
    assert abs(val.targets.mean()) > 1e-3


def test_the_table_gives_its_tensors_whole():
    train = Diabetes("train")

    for whole, sliced in zip(train.tensors(), train[:], strict=True):
        assert torch.equal(whole, sliced)


def text(split="train", **options):
    options = {"context": 16, "modules": FEW, **options}
    return StandardLibraryText(split, **options)


def test_text_is_read_and_what_follows_follows():
    dataset = text()

    before, _ = dataset[1]
    tokens, following = dataset[2]

    assert torch.equal(tokens[1:], following[:-1])
    assert torch.equal(torch.cat([before, tokens]), dataset.tokens[16:48])
    characters = {ALPHABET[token] for token in dataset.tokens}
    assert characters <= set(dataset.classes)


def test_text_that_is_not_there_or_too_short_is_refused():
    with pytest.raises(DataError, match="no source"):
        docstrings("no_such_module")
    with pytest.raises(DataError, match="context=100000"):
        text("val", context=100_000)


def test_no_string_is_in_two_splits():
    texts = []
    for split in SPLITS:
        characters = [ALPHABET[token] for token in text(split).tokens]
        texts.append("".join(characters))
    strings = []
    for module in FEW:
        strings += docstrings(module)

    for string in strings:
        if len(string) > 60:  # a short one may stand in several docstrings
            homes = [whole for whole in texts if string in whole]
            assert len(homes) == 1


def test_a_shift_of_text_is_drawn_by_the_samples_own_key():
    shifted = text(shift=True)

    def drawn(seed):
        torch.manual_seed(seed)
        return torch.stack([shifted[i][0] for i in range(20)])

    first = drawn(seed=0)
    assert torch.equal(first, drawn(seed=0))
    assert not torch.equal(first, drawn(seed=1))


def test_noise_comes_with_the_image_alone():
    samples = [(torch.ones(1, 4, 4), 3)]
    dataset = WithNoise(samples, latent_dim=5, transform=lambda image: image * 2)

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
    found = fingerprint(_Holding(value, attribute))

    again = fingerprint(_Holding(value, attribute))
    of_other = fingerprint(_Holding(other, attribute))
    assert found == again
    assert found != of_other


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


class _Failing(_Holding):
    def fingerprint(self):
        raise KeyError("no table")


class _Endless(_Holding):
    def __len__(self):
        raise TypeError("a stream")


def test_a_fingerprint_method_that_fails_is_no_reason_to_fail(caplog):
    found = fingerprint(_Failing([1]))

    assert found == fingerprint(_Failing([1]))
    assert found != fingerprint(_Failing([2]))
    assert "_Failing.fingerprint() failed: KeyError: 'no table'" in caplog.text


def test_what_has_no_length_or_holds_itself_has_a_fingerprint():
    assert fingerprint(_Endless([1])) != fingerprint(_Endless([2]))
    round_itself = []
    round_itself.append(round_itself)
    assert len(fingerprint(_Holding(round_itself))) == 16


def test_a_fingerprint_does_not_read_a_large_file_whole(tmp_path):
    mapped = np.memmap(tmp_path / "large", np.uint8, "w+", shape=2**26)
    before = fingerprint(_Holding(mapped))

    mapped[2**25] = 1  # in the middle
    assert fingerprint(_Holding(mapped)) == before
    mapped[-1] = 1
    assert fingerprint(_Holding(mapped)) != before


@pytest.mark.parametrize(
    ("value", "digest"),
    [
        pytest.param([3, 1, 2], "836ffc63e82d173b", id="numbers"),
        pytest.param(["cat", "dog"], "7a4389ab7ebc8194", id="texts"),
        pytest.param([Path("a/b.png")], "d0a7580fcd39bec7", id="paths"),
        pytest.param(torch.arange(6.0).view(2, 3), "2f0fb19e7ffcfb66", id="tensor"),
        pytest.param([[1, 2], [3, 4]], "cf78c62af7887a0a", id="nested"),
    ],
)
def test_the_fingerprints_of_manifests_stay(value, digest):
    """They were written down: a resume compares those of tables."""
    assert fingerprint(_Holding(value)) == digest


def test_fingerprints_tell_data_apart():
    changed = Digits("val")
    changed.inputs[3, 0, 2, 2] += 1
    others = [
        Digits("test"),
        Digits("val", image_size=8),
        Digits("val", split_seed=1),
        changed,
        [1, 2],
    ]

    digits = fingerprint(Digits("val"))

    assert digits == fingerprint(Digits("val"))
    of_others = {fingerprint(other) for other in others}
    assert len(of_others) == 5
    assert digits not in of_others


def test_a_fingerprint_of_ones_own_is_taken():
    class Own:
        def fingerprint(self):
            return "version 3"

    assert fingerprint(Own()) == "version 3"


def test_the_fingerprint_of_a_folder_is_that_of_its_names(picture_tree):
    def of_folder():
        return fingerprint(image_folder(str(picture_tree), "train"))

    before = of_folder()
    assert before == of_folder()

    cats = picture_tree / "train" / "cat"
    (cats / "00.jpg").rename(cats / "zz.jpg")

    assert before != of_folder()
