"""What `data.cache=device` cannot keep is said before the data are open, with a way out."""

from pathlib import Path
from typing import Any

import pytest
import torch

from conf.check import parse
from conf.errors import ConfigError
from data.sources import Digits, ImageTensors
from scripts.composition.compose import compose
from trainer.assembly import data
from trainer.assembly.check import check_targets
from trainer.assembly.data import build_data, kept_bytes, set_cache

DEVICE = ["experiment=resnet18", "model=mlp", "data.cache=device"]


@pytest.mark.parametrize(
    ("words", "keys", "text"),
    [
        pytest.param(
            ["transforms=randaugment"],
            ["transforms.train.augment"],
            "RandAugment takes single samples, and data.cache=device gathers whole batches",
            id="step",
        ),
        pytest.param(
            ["data=image_folder", "data.root=/nowhere"],
            ["transforms.eval.resize", "transforms.eval.crop"],
            "or set data.cache=ram",
            id="files",
        ),
        pytest.param(
            ["experiment=char_lm", "model=gpt_tiny"],
            ["data.cache"],
            "cannot be kept there; set data.cache=none",
            id="class",
        ),
        pytest.param(
            ["loader.collate_fn={_target_: torch.utils.data.default_collate, _partial_: true}"],
            ["loader.collate_fn"],
            "puts single samples together",
            id="collate",
        ),
    ],
)
def test_what_cannot_be_kept_is_refused(words: list[str], keys: list[str], text: str) -> None:
    config = parse(compose([*DEVICE, *words]).config)
    with pytest.raises(ConfigError) as caught:
        check_targets(config)
    found = {p.key: f"{p.message}; {p.hint}" for p in caught.value.problems}
    assert [key for key in keys if key not in found] == []
    assert text in found[keys[0]]


@pytest.mark.parametrize("words", [[], ["transforms=on_device"], ["experiment=segmentation"]])
def test_what_can_be_kept_passes(words: list[str]) -> None:
    check_targets(parse(compose([*DEVICE, *words, "model=mlp"]).config))


def test_what_shows_only_in_the_object_is_refused_as_well() -> None:
    config = parse(compose(DEVICE).config)

    class Own(ImageTensors):
        def __getitem__(self, index: int) -> tuple[Any, int]:
            return self.images[index] / 2, 0

    with pytest.raises(ConfigError, match=r"data\.cache: is device, but data\.val \(Own\) cannot"):
        set_cache(config, "val", Own(torch.zeros(2, 3, 4, 4), torch.zeros(2), []))
    with pytest.raises(ConfigError, match=r"data\.val\.transform: takes single samples"):
        set_cache(config, "val", Digits("val", transform=lambda image: image))


def _folder(root: str) -> ImageTensors | None:
    return None


def _anything(root):
    return None


def test_the_class_that_a_function_returns_is_known_if_it_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(data, "locate", {"folder": _folder, "any": _anything}.__getitem__)
    assert data._kind("folder") is ImageTensors
    assert data._kind("any") is None


def test_the_plan_counts_what_is_kept(digit_photographs: Path) -> None:
    config = parse(compose([*DEVICE, "data.image_size=16"]).config)
    sets = build_data(config).sets
    assert kept_bytes(config, sets) == (1257 + 270 + 270) * (16 * 16 + 8)
    files = [
        "experiment=resnet18",
        "data=cifar10_folder",
        f"data.root={digit_photographs}",
        "data.cache=device",
    ]
    config = parse(compose([*files, "dry_run=true"]).config)
    assert kept_bytes(config, build_data(config).sets) is None  # nothing is decoded yet
    assert kept_bytes(parse(compose(["experiment=resnet18"]).config), sets) == 0
