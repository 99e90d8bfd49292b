"""Data for other tasks: scenes, tables, text, noise."""

import random

import numpy as np
import pytest
import torch

from data.errors import DataError, MissingPackageError, import_package
from data.loading.loader import Loader
from data.orders import Sequential
from data.sources import UNSURE, Diabetes, DigitScenes, WithNoise
from data.text import ALPHABET, StandardLibraryText, docstrings
from data.updates import UpdateSampler

SPLITS = ("train", "val", "test")
FEW = ("textwrap", "heapq", "string")  # modules that are quickly read


@pytest.fixture(scope="module")
def scenes() -> DigitScenes:
    return DigitScenes("val", "mask", image_size=16)


def test_a_scene_and_its_mask_agree(scenes: DigitScenes) -> None:
    for index in range(0, len(scenes), 30):
        image, mask = scenes[index]
        assert image.shape == (1, 16, 16)
        ink = image[0] >= 96
        assert torch.equal((mask > 0) & (mask != UNSURE), ink)
        assert torch.equal(mask == UNSURE, (image[0] >= 32) & ~ink)


def test_the_digits_that_are_present_are_those_of_the_mask(scenes: DigitScenes) -> None:
    labels = DigitScenes("val", "present", image_size=16)
    assert torch.equal(scenes.images, labels.images)
    for index in range(0, len(scenes), 30):
        numbers = set(scenes[index][1].unique().tolist()) - {0, UNSURE}
        assert {int(i) + 1 for i in labels[index][1].nonzero()} == numbers
    assert 1 <= labels.target.sum(1).min() <= labels.target.sum(1).max() <= 3


def test_scenes_are_the_same_for_ever_and_touch_no_random_state(scenes: DigitScenes) -> None:
    before = (torch.get_rng_state(), random.getstate(), np.random.get_state()[1].copy())
    again = DigitScenes("val", "mask", image_size=16)
    assert torch.equal(before[0], torch.get_rng_state())
    assert before[1] == random.getstate()
    assert np.array_equal(before[2], np.random.get_state()[1])
    assert torch.equal(scenes.images, again.images)
    assert not torch.equal(
        scenes.images, DigitScenes("val", "mask", image_size=16, split_seed=1).images
    )


@pytest.mark.parametrize("wrong", [{"image_size": 15}, {"most": 5}], ids=str)
def test_impossible_scenes_are_refused(wrong) -> None:
    with pytest.raises(DataError):
        DigitScenes("val", **{"image_size": 16, **wrong})


def test_the_table_is_split_once_and_standardised_by_its_training_part() -> None:
    parts = [Diabetes(split) for split in SPLITS]
    assert [torch.equal(*pair) for pair in zip(parts[0].tensors(), parts[0][:], strict=True)] == [
        True
    ] * 2
    assert [len(part) for part in parts] == [310, 66, 66]
    rows = torch.cat([part.features for part in parts])
    assert len(rows.unique(dim=0)) == 442
    train = parts[0]
    torch.testing.assert_close(train.features.mean(0), torch.zeros(10), atol=1e-5, rtol=0)
    torch.testing.assert_close(train.values.std(), torch.tensor(1.0))
    assert abs(parts[1].values.mean()) > 1e-3
    features, value = train[3]
    assert features.shape == (10,)
    assert value.shape == ()


def text(split: str = "train", **options) -> StandardLibraryText:
    return StandardLibraryText(split, **{"context": 16, "modules": FEW, **options})


def test_text_is_read_without_importing_it() -> None:
    assert any("Wrap" in string or "wrap" in string for string in docstrings("textwrap"))
    with pytest.raises(DataError, match="no source"):
        docstrings("no_such_module")


def test_what_follows_follows() -> None:
    dataset = text()
    tokens, following = dataset[2]
    assert torch.equal(tokens[1:], following[:-1])
    assert torch.equal(torch.cat([dataset[1][0], dataset[2][0]]), dataset.tokens[16:48])
    assert {ALPHABET[t] for t in dataset.tokens} <= set(dataset.classes)


def test_no_string_is_in_two_splits() -> None:
    def joined(split: str) -> str:
        return "".join(ALPHABET[t] for t in text(split).tokens)

    whole = {split: joined(split) for split in SPLITS}
    everything = [s for module in FEW for s in docstrings(module)]
    homes = [[split for split in SPLITS if s in whole[split]] for s in everything if len(s) > 60]
    assert all(len(found) == 1 for found in homes)


def test_windows_shift_by_seed_and_epoch_alone() -> None:
    def drawn(epoch: int, workers: int = 0) -> torch.Tensor:
        dataset = text(shift=True)
        sampler = UpdateSampler(Sequential(len(dataset)), batch_size=8)
        loader = Loader(dataset, sampler, seed=1, num_workers=workers)
        batches = torch.cat([m.batch[0] for m in loader.epoch(epoch)])
        loader.close()
        return batches

    assert torch.equal(drawn(0), drawn(0, workers=2))
    assert not torch.equal(drawn(0), drawn(1))


def test_too_little_text_is_refused() -> None:
    with pytest.raises(DataError, match="context=100000"):
        text("val", context=100_000)


def test_noise_comes_with_the_image_alone() -> None:
    dataset = WithNoise([(torch.ones(1, 4, 4), 3)], latent_dim=5, transform=lambda image: image * 2)
    torch.manual_seed(0)
    image, noise = dataset[0]
    torch.manual_seed(0)
    assert torch.equal(noise, torch.randn(5))
    assert image.unique().tolist() == [2.0]


def test_a_package_that_is_missing_is_a_mistake_of_the_configuration() -> None:
    with pytest.raises(
        MissingPackageError, match=r"pip install 'regimen\[huggingface\]'"
    ) as caught:
        import_package("regimen_has_no_such_package", "huggingface")
    assert caught.value.exit_code == 2
