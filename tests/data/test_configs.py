"""The shipped data and transforms groups: what chooses what, and what they build."""

import inspect
from collections import Counter
from pathlib import Path

import pytest
import torch
from hydra.utils import get_object

from regimen.conf.check import parse
from regimen.conf.errors import ConfigError
from regimen.data.samplers import UpdateSampler, as_order, as_updates
from regimen.data.sources import Digits
from regimen.data.timm_augment import TimmRandAugment
from regimen.scripts.composition.compose import compose
from regimen.trainer.targets.instantiate import instantiate

CONF = Path(__file__).parents[2] / "conf"


def _all(loader):
    return torch.cat([micro.batch[0] for micro in loader.epoch(0)])


@pytest.mark.parametrize(
    ("words", "first"),
    [
        ([], "affine"),
        (["data=cifar10"], "crop"),
        (["transforms=basic", "data=cifar10"], "to_float"),
        (["experiment=resnet18_cifar10", "transforms=basic"], "to_float"),
    ],
)
def test_a_data_set_chooses_transforms_that_others_override(words, first):
    config = parse(compose(words).config)

    steps = list(config.transforms.train)

    assert steps[0] == first


@pytest.mark.parametrize("size", [8, 40])
def test_pictures_of_any_size_become_those_of_the_size_asked_for(
    picture_tree, write_image, built, size
):
    write_image(picture_tree / "train" / "cat" / "tiny.png", size=(1, 1))
    write_image(picture_tree / "test" / "cat" / "wide.png", size=(90, 7))

    loaders = built("data=image_folder", f"data.root={picture_tree}", f"data.image_size={size}")

    for loader in loaders:
        assert _all(loader).shape[1:] == (3, size, size)


TRANSFORMS = {p.stem for p in (CONF / "transforms").glob("*")} - {"detection"}  # which moves boxes


@pytest.mark.parametrize("size", [8, 40])
def test_digits_are_standardised(built, size):
    _, loader = built("data=digits", f"data.image_size={size}")

    pixels = _all(loader)

    assert abs(float(pixels.mean())) < 0.1
    assert abs(float(pixels.std()) - 1) < 0.2


@pytest.mark.parametrize("transforms", sorted(TRANSFORMS))
def test_transforms_run_as_configured(picture_tree, write_image, built, transforms):
    for path in picture_tree.rglob("*.jpg"):
        write_image(path, size=(12, 12))
    words = [
        "data=image_folder",
        f"data.root={picture_tree}",
        "data.image_size=12",
        "data.num_classes=2",
        f"transforms={transforms}",
        "loader.batch_size=4",
    ]

    for loader in built(*words):
        inputs, targets = next(loader.epoch(0)).batch
        assert len(inputs) == 4
        assert inputs.shape[-3] == 3
        if transforms != "none":
            assert inputs.dtype == torch.float32
        if any("mix" in name for name in loader.transforms.steps):
            assert targets.shape == (4, 2)  # a share of each class
        else:
            assert targets.shape == (4,)


def _second_epoch(built, *words):
    """Return the samples of training's second epoch, and what the network sees of them."""
    loader, *_ = built(*words)
    indices = []
    inputs = []
    for micro in loader.epoch(1):
        indices += micro.batch_slice.indices
        inputs.append(micro.batch[0])
    loader.close()
    return indices, torch.cat(inputs)


@pytest.mark.parametrize("transforms", ["deit", "resnet50_v2"])
def test_repeated_samples_are_augmented_anew_whatever_the_workers(
    picture_tree, write_image, built, transforms
):
    """timm's draws, which come from `random` and numpy, are keyed as torch's are."""
    if transforms == "deit":
        pytest.importorskip("timm")
    for path in picture_tree.rglob("*.jpg"):
        write_image(path, size=(40, 30))
    words = [
        "data=image_folder",
        f"data.root={picture_tree}",
        "data.val_fraction=0",
        f"transforms={transforms}",
        "transforms.train.crop.size=[16,16]",
        "transforms.device.mix=null",
        "+loader/sampler=repeated",
        "loader.sampler.round_to=7",
        "loader.batch_size=7",
    ]

    indices, images = _second_epoch(built, *words)

    assert sorted(Counter(indices).values()) == [2, 3, 3, 3, 3]
    assert len({image.numpy().tobytes() for image in images}) == 14
    for more in ("loader.num_workers=2", "trainer.gradient_accumulation_steps=3"):
        other_indices, other_images = _second_epoch(built, *words, more)
        assert other_indices == indices
        assert torch.equal(other_images, images)


@pytest.mark.parametrize("policy", ["rand-mx", "rand-m9-mstd", "m9", "rand-m9-q1", ""])
def test_a_policy_of_which_timm_would_ignore_a_part_is_refused(policy):
    pytest.importorskip("timm")
    with pytest.raises(ConfigError, match="is no policy of timm"):
        TimmRandAugment(policy, 16, [0.5])


def test_a_policy_of_timm_takes_grey_images():
    pytest.importorskip("timm")
    augment = TimmRandAugment("rand-m9-n4-p1-inc1", 16, [0.5], "bilinear")
    image = torch.arange(256, dtype=torch.uint8).view(1, 16, 16)

    assert augment(image).shape == (1, 16, 16)


def test_an_interpolation_that_timm_lacks_is_refused():
    pytest.importorskip("timm")
    with pytest.raises(ConfigError, match="interpolation='cubic' is none of nearest"):
        TimmRandAugment("rand-m9", 16, [0.5], "cubic")


@pytest.mark.parametrize("path", sorted((CONF / "loader").glob("*/*.yaml")), ids=lambda p: p.stem)
def test_samplers_run_as_configured(path):
    group = path.parent.name
    words = [f"+loader/{group}={path.stem}"]
    if path.stem.startswith("repeated"):
        words.append("loader.sampler.round_to=16")
    node = compose(words).config["loader"][group]
    digits = Digits("val", image_size=8)
    # torch calls the data set `data_source`; not all samplers have a seed.
    given = {"dataset": digits, "data_source": digits, "seed": 3}
    parameters = inspect.signature(get_object(node["_target_"])).parameters
    sampler = instantiate(node, **{name: given[name] for name in given if name in parameters})

    if group == "batch_sampler":
        updates = UpdateSampler(as_updates(sampler, 3), batch_size=64)
    else:
        updates = UpdateSampler(as_order(sampler, 3), batch_size=64)

    indices = []
    for update in range(len(updates)):
        (batch_slice,) = updates.batch_slices(0, update)
        indices += batch_slice.indices
    assert 100 < len(indices) <= 1000
    assert max(indices) < len(digits)


def test_the_stream_holds_the_digits(built):
    words = ["transforms=basic", "loader.shuffle=false"]

    streamed, *_ = built("data=digits_stream", *words)
    digits, *_ = built("data=digits", *words)

    assert torch.equal(_all(streamed), _all(digits))
