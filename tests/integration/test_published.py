"""The published recipes of conf/experiment, held against what was published.

ImageNet is a stand-in of as many samples without pixels, and the networks have no memory: what is
compared is the plan, not a training.
"""

import math
from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import nn

from regimen.conf.check import parse
from regimen.data.transforms import Pipeline
from regimen.scripts.composition.compose import compose
from regimen.trainer.assembly.check import check_targets
from regimen.trainer.assembly.data import Data, build_transforms
from regimen.trainer.assembly.loaders import eval_loader, train_loader
from regimen.trainer.assembly.parts import Assembly, with_counted_classes
from regimen.trainer.options import count, horizon
from regimen.trainer.strategies.strategy import Strategy

IMAGES = {"train": 1_281_167, "val": 50_000}
TOKENS = {"train": 9_035_582_198 // 1024, "val": 4_434_897 // 1024}  # nanoGPT's files, in samples


class StandIn:
    """A data set that has a length, and no sample."""

    def __init__(self, samples: int) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> Any:
        raise AssertionError("a plan reads no sample")


def half_cosine(share: float) -> float:
    return 0.5 * (1 + math.cos(math.pi * share))


def resnet50_v2(update: int) -> float:
    epoch = update // 1251
    if epoch < 5:
        return 0.5 * (0.01 + 0.99 * epoch / 5)
    return 0.5 * half_cosine((epoch - 5) / 595)


def timm_cosine(epoch: int, epochs: int, top: float, low: float, start: float) -> float:
    if epoch < 5:
        return start + epoch * (top - start) / 5
    return low + (top - low) * half_cosine(epoch / epochs)


def convnext_t(update: int) -> float:
    if update < 20 * 312:
        return 4e-3 * update / (20 * 312 - 1)  # numpy.linspace, whose last value is the top
    return 1e-6 + (4e-3 - 1e-6) * half_cosine((update - 20 * 312) / (280 * 312))


def vit_s16_90(update: int) -> float:
    return 1e-3 * min(1, update / 10_000) * half_cosine(max(0, update - 10_000) / (112_590 - 1e4))


def gpt2_124m(update: int) -> float:
    if update < 2000:
        return 6e-4 * (update + 1) / 2001
    return 6e-5 + (6e-4 - 6e-5) * half_cosine((update - 2000) / 598_000)


class Recipe(NamedTuple):
    """What was published. `decay`: of a parameter, by its name and its tensor."""

    updates: int
    batch: int
    parameters: int
    decays: set[float]
    decay: Callable[[str, torch.Tensor], float]
    rate: Callable[[int], float]
    sizes: tuple[int, int] = (0, 0)  # in training, and of the shorter side in evaluation
    mix: tuple[float, ...] = ()  # alpha of MixUp, of CutMix
    repeats: int = 1
    clip: float | None = None


RECIPES = {
    "resnet50_v2": Recipe(
        updates=600 * 1251,
        batch=1024,
        parameters=25_557_032,
        decays={0.0, 2e-5},
        decay=lambda name, p: 0.0 if "bn" in name or "downsample.1" in name else 2e-5,
        rate=resnet50_v2,
        sizes=(176, 232),
        mix=(0.2, 1.0),
        repeats=4,
    ),
    "resnet50_a3": Recipe(
        updates=100 * 625,
        batch=2048,
        parameters=25_557_032,
        decays={0.0, 0.02},
        decay=lambda name, p: 0.0 if p.ndim == 1 else 0.02,
        rate=lambda update: timm_cosine(update // 625, 100, 8e-3, 1e-6, 1e-4),
        sizes=(160, 235),
        mix=(0.1, 1.0),
    ),
    "vit_s16_90": Recipe(
        updates=90 * 1251,
        batch=1024,
        parameters=22_050_664 - 198 * 384,  # DeiT-S without class token and learned positions
        decays={0.0, 0.1},
        decay=lambda name, p: 0.1 if p.ndim > 1 else 0.0,
        rate=vit_s16_90,
        sizes=(224, 256),
        mix=(0.2,),
        clip=1.0,
    ),
    "deit_s": Recipe(
        updates=300 * 1251,
        batch=1024,
        parameters=22_050_664,
        decays={0.0, 0.05},
        decay=lambda name, p: 0.0 if p.ndim == 1 or name in ("pos_embed", "cls_token") else 0.05,
        rate=lambda update: timm_cosine(max(update // 1251 - 1, 0), 300, 1e-3, 1e-5, 1e-6),
        sizes=(224, 256),
        mix=(0.8, 1.0),
        repeats=3,
    ),
    "convnext_t": Recipe(
        updates=300 * 312,
        batch=4096,
        parameters=28_589_128,
        decays={0.0, 0.05},
        decay=lambda name, p: 0.0 if p.ndim == 1 else 0.05,
        rate=convnext_t,
        sizes=(224, 256),
        mix=(0.8, 1.0),
    ),
    "gpt2_124m": Recipe(
        updates=600_000,
        batch=480,
        parameters=124_439_808 + 47 * 768,  # its vocabulary is rounded up
        decays={0.0, 0.1},
        decay=lambda name, p: 0.1 if p.ndim > 1 else 0.0,
        rate=gpt2_124m,
        clip=1.0,
    ),
}


class Plan:
    """A recipe's configuration, and its parts over the stand-in."""

    def __init__(self, name: str) -> None:
        if name not in ("resnet50_v2", "gpt2_124m"):
            pytest.importorskip("timm")
        config = parse(compose([f"experiment={name}", "data.root=imagenet"]).config)
        check_targets(config)
        classes = 50304 if name == "gpt2_124m" else 1000
        self.config = with_counted_classes(config, classes)
        samples = TOKENS if name == "gpt2_124m" else IMAGES
        strategy = Strategy("cpu")
        sets = {split: StandIn(number) for split, number in samples.items()}
        self.train = train_loader(config, Data(sets, classes), strategy)
        self.val = eval_loader(config, sets["val"], strategy)
        self.val_samples = samples["val"]
        options = config.trainer
        self.per_epoch = count(options.limit_train_batches, len(self.train))
        self.total = horizon(options, self.per_epoch)
        meta = Strategy("meta")
        self.parts = Assembly(self.config, meta, classes, self.per_epoch)
        with meta.device:
            self.model: nn.Module = self.parts.model
            self.optimizers = self.parts.optimizers


@pytest.fixture(params=RECIPES)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def test_a_plan_is_the_published_one(name: str) -> None:
    recipe = RECIPES[name]
    plan = Plan(name)
    assert plan.config.name == name
    assert plan.total == recipe.updates
    sampler = plan.train.sampler
    updates = [sampler.updates.samples(0, update) for update in (0, 1, plan.per_epoch - 1)]
    assert {len(samples) for samples in updates} == {recipe.batch}
    evaluated = plan.val.sampler.updates
    assert sum(len(evaluated.samples(0, u)) for u in range(len(evaluated))) == plan.val_samples
    assert plan.config.trainer.clip_grad_norm == recipe.clip

    # Every parameter is in a group, of the published decay and the rate of the first update.
    assert sum(p.numel() for p in plan.model.parameters()) == recipe.parameters
    decays = {}
    for group in plan.optimizers.groups():
        for parameter in group.options["params"]:
            decays[plan.optimizers.names[parameter]] = group.options["weight_decay"]
    expected = {n: recipe.decay(n, p) for n, p in plan.model.named_parameters()}
    assert decays == expected
    assert set(decays.values()) == recipe.decays

    places = sorted([*(recipe.updates * tenth // 10 for tenth in range(10)), 5000])
    places.append(recipe.updates - 1)
    for place, rates in zip(places, plan.parts.schedule.preview(places), strict=True):
        assert set(rates) == {group.name for group in plan.optimizers.groups()}
        (rate,) = set(rates.values())
        assert rate == pytest.approx(recipe.rate(place), rel=1e-3, abs=1e-9)


@pytest.mark.parametrize("name", [name for name in RECIPES if name != "gpt2_124m"])
def test_images_have_the_published_sizes_and_draws(name: str) -> None:
    recipe = RECIPES[name]
    plan = Plan(name)
    image = torch.randint(0, 256, (3, 300, 400), dtype=torch.uint8)
    train = build_transforms(plan.config, "train", 1000)
    out = Pipeline(train)(image)
    assert out.shape == (3, recipe.sizes[0], recipe.sizes[0])
    evaluation = build_transforms(plan.config, "eval", 1000)
    assert evaluation["resize"].size == [recipe.sizes[1]]
    assert Pipeline(evaluation)(image).shape == (3, 224, 224)
    (mix,) = build_transforms(plan.config, "device", 1000).values()
    assert tuple(one.alpha for one in getattr(mix, "transforms", [mix])) == recipe.mix

    crop = train["crop"]
    low = 0.05 if name == "vit_s16_90" else 0.08
    assert list(crop.scale) == [low, 1.0]
    assert list(crop.ratio) == pytest.approx([3 / 4, 4 / 3])
    erasing = {"resnet50_v2": 0.1, "deit_s": 0.25, "convnext_t": 0.25}
    assert getattr(train.get("erase"), "p", None) == erasing.get(name)


@pytest.mark.parametrize("name", ["resnet50_v2", "deit_s"])
def test_an_epoch_repeats_samples_and_is_as_long_as_in_deit(name: str) -> None:
    recipe = RECIPES[name]
    plan = Plan(name)
    order = plan.train.sampler.updates.order
    epochs = [order(epoch) for epoch in (0, 1)]
    assert [len(epoch) for epoch in epochs] == [1_281_024] * 2
    times = Counter(np.bincount(epochs[0], minlength=1_281_167).tolist())
    assert times[recipe.repeats] == 1_281_024 // recipe.repeats
    assert times[0] >= 1_281_167 - math.ceil(1_281_024 / recipe.repeats)
    assert len(set(epochs[0].tolist()) - set(epochs[1].tolist())) > 100_000


def test_the_average_of_resnet50_v2_has_torchvisions_decay() -> None:
    ema = Plan("resnet50_v2").parts.callbacks["ema"]
    assert ema._decay == pytest.approx(1 - (1 - 0.99998) * 1024 * 32 / 600)  # type: ignore[attr-defined]
    pytest.importorskip("timm")
    assert Plan("convnext_t").parts.callbacks["ema"]._decay == 0.9999  # type: ignore[attr-defined]


def test_losses_and_networks_are_those_of_the_papers() -> None:
    smoothing = {"resnet50_v2": 0.1, "deit_s": 0.1, "convnext_t": 0.1, "vit_s16_90": 0.0}
    for name, share in smoothing.items():
        (term,) = Plan(name).parts.task.losses.terms.values()  # type: ignore[attr-defined]
        assert type(term.loss) is nn.CrossEntropyLoss
        assert term.loss.label_smoothing == share
    (term,) = Plan("resnet50_a3").parts.task.losses.terms.values()  # type: ignore[attr-defined]
    assert isinstance(term.loss, nn.BCEWithLogitsLoss)
    assert term.loss.target_threshold == 0.2
    rates = {}
    for name in ("deit_s", "convnext_t"):
        modules = Plan(name).model.named_modules()
        rates[name] = [m.drop_prob for _, m in modules if type(m).__name__ == "DropPath"]
        assert max(rates[name]) == pytest.approx(0.1)
        assert rates[name] == sorted(rates[name])
