"""The shipped data and transforms groups: what chooses what, and what they build."""

import inspect
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
    assert next(iter(parse(compose(words).config).transforms.train)) == first


@pytest.mark.parametrize("size", [8, 40])
def test_a_folder_of_any_sizes_and_digits_as_configured(picture_tree, write_image, built, size):
    write_image(picture_tree / "train" / "cat" / "tiny.png", size=(1, 1))
    write_image(picture_tree / "test" / "cat" / "wide.png", size=(90, 7))
    words = ("data=image_folder", f"data.root={picture_tree}", f"data.image_size={size}")
    assert all(_all(loader).shape[1:] == (3, size, size) for loader in built(*words))
    digits = _all(built("data=digits", f"data.image_size={size}")[1])
    assert abs(float(digits.mean())) < 0.1
    assert abs(float(digits.std()) - 1) < 0.2


TRANSFORMS = {p.stem for p in (CONF / "transforms").glob("*")} - {"detection"}  # which moves boxes


@pytest.mark.parametrize("transforms", sorted(TRANSFORMS))
def test_transforms_run_as_configured(picture_tree, write_image, built, transforms):
    for path in picture_tree.rglob("*.jpg"):
        write_image(path, size=(12, 12))
    words = ["data=image_folder", f"data.root={picture_tree}", "data.image_size=12"]
    words += ["data.num_classes=2", f"transforms={transforms}", "loader.batch_size=4"]
    for loader in built(*words):
        inputs, targets = next(loader.epoch(0)).batch
        mixes = any("mix" in name for name in loader.transforms.steps)
        assert len(inputs) == len(targets) == 4
        assert inputs.shape[-3] == 3
        assert transforms == "none" or inputs.dtype == torch.float32
        assert targets.shape == ((4, 2) if mixes else (4,))


@pytest.mark.parametrize("transforms", ["deit", "resnet50_v2"])
def test_repeated_samples_are_augmented_anew_whatever_the_workers(
    picture_tree, write_image, built, transforms
):
    """timm's draws, which come from `random` and numpy, are keyed as torch's are."""
    if transforms == "deit":
        pytest.importorskip("timm")
    for path in picture_tree.rglob("*.jpg"):
        write_image(path, size=(40, 30))
    words = ["data=image_folder", f"data.root={picture_tree}", f"transforms={transforms}"]
    words += ["transforms.train.crop.size=[16,16]", "transforms.device.mix=null"]
    words += ["+loader/sampler=repeated", "loader.sampler.round_to=7", "loader.batch_size=7"]
    seen = []
    for more in ([], ["loader.num_workers=2"], ["trainer.gradient_accumulation_steps=3"]):
        loader = built(*words, "data.val_fraction=0", *more)[0]
        micro_batches = list(loader.epoch(1))
        loader.close()
        indices = [index for micro in micro_batches for index in micro.batch_slice.indices]
        seen.append((indices, torch.cat([micro.batch[0] for micro in micro_batches])))
    indices, images = seen[0]
    assert sorted(indices.count(index) for index in set(indices)) == [2, 3, 3, 3, 3]
    for others, same in seen[1:]:
        assert others == indices
        assert torch.equal(same, images)
    assert len({tuple(image.flatten().tolist()) for image in images}) == 14


@pytest.mark.parametrize("policy", ["rand-mx", "rand-m9-mstd", "m9", "rand-m9-q1", ""])
def test_a_policy_of_which_timm_would_ignore_a_part_is_refused(policy):
    pytest.importorskip("timm")
    with pytest.raises(ConfigError, match="is no policy of timm"):
        TimmRandAugment(policy, 16, [0.5])
    grey = TimmRandAugment("rand-m9-n4-p1-inc1", 16, [0.5], "bilinear")
    image = torch.arange(256, dtype=torch.uint8).view(1, 16, 16)
    assert grey(image).shape == (1, 16, 16)
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
    given = {"dataset": digits, "data_source": digits, "seed": 3}
    taken = inspect.signature(get_object(node["_target_"])).parameters
    sampler = instantiate(node, **{k: v for k, v in given.items() if k in taken})
    batches = group == "batch_sampler"
    updates = as_updates(sampler, 3) if batches else as_order(sampler, 3)
    epoch = UpdateSampler(updates, batch_size=64)
    indices = [i for t in range(len(epoch)) for i in epoch.batch_slices(0, t)[0].indices]
    assert 100 < len(indices) <= 1000
    assert max(indices) < len(digits)


def test_the_stream_holds_the_digits(built):
    words = ("transforms=basic", "loader.shuffle=false")
    streamed, digits = (built(f"data={name}", *words)[0] for name in ("digits_stream", "digits"))
    assert torch.equal(_all(streamed), _all(digits))
