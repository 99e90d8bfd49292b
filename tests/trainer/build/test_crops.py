"""A random crop that does not fit is found before a run, where the size of the images is known."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from conf.check import parse
from conf.errors import ConfigError
from conf.schema import Config
from scripts.composition.compose import compose
from trainer.build.crops import crop_problems
from trainer.build.data import build_data

V2, OURS = "torchvision.transforms.v2", "data.batch_transforms"


@pytest.fixture(scope="module")
def config() -> Config:
    return parse(compose(["experiment=resnet18", "model=mlp"]).config)


def found(config: Config, size: Any, stage: str = "train", **steps: Any) -> dict[str, str]:
    transforms = replace(config.transforms, **{stage: steps})
    dataset = SimpleNamespace(input_form=lambda: {"size": size})
    sets = {"train": dataset, "val": dataset, "test": None}
    problems = crop_problems(replace(config, transforms=transforms), sets)
    return {problem.key: problem.message for problem in problems}


def crop(size: Any, of: str = V2, **more: Any) -> dict[str, Any]:
    return {"_target_": f"{of}.RandomCrop", "size": size, **more}


def resize(size: Any) -> dict[str, Any]:
    return {"_target_": f"{V2}.Resize", "size": size}


@pytest.mark.parametrize(
    ("stage", "steps"),
    [
        pytest.param("train", {"c": crop(17)}, id="a side"),
        pytest.param("device", {"c": crop(17, OURS)}, id="on the device"),
        pytest.param("eval", {"c": crop([16, 17])}, id="width, in evaluation"),
        pytest.param("train", {"c": crop(21, padding=2)}, id="padded"),
        pytest.param("train", {"c": crop([16, 17], padding=[0, 5])}, id="padded above and below"),
        pytest.param("train", {"c": crop([17, 16], padding=[1, 0, 1, 0])}, id="padded beside"),
        pytest.param("train", {"r": resize(12), "c": crop(13)}, id="resized"),
        pytest.param("train", {"a": crop(12), "c": crop(13)}, id="after another"),
    ],
)
def test_a_crop_larger_than_the_images_is_named(
    config: Config, stage: str, steps: dict[str, Any]
) -> None:
    (key,) = found(config, [16, 16], stage, **steps)
    assert key == f"transforms.{stage}.c.size"


@pytest.mark.parametrize(
    ("size", "steps"),
    [
        pytest.param([16, 16], {"c": crop(16)}, id="fits"),
        pytest.param([16, 16], {"c": crop(20, padding=2)}, id="padded"),
        pytest.param([16, 16], {"c": crop(40, pad_if_needed=True)}, id="padded if needed"),
        pytest.param([16, 20], {"c": crop([16, 20])}, id="not square"),
        pytest.param([16, 16], {"r": resize([40, 40]), "c": crop(40)}, id="enlarged"),
        pytest.param([16, 20], {"r": resize(40), "c": crop([40, 50])}, id="enlarged, not square"),
        pytest.param([16, 16], {"m": {"_target_": "mine.Twice"}, "c": crop(32)}, id="own step"),
        pytest.param(None, {"c": crop(1000)}, id="files of any size"),
        pytest.param([16, 16], {"c": None}, id="dropped"),
    ],
)
def test_what_fits_or_may_fit_is_not(config: Config, size: Any, steps: dict[str, Any]) -> None:
    assert found(config, size, **steps) == {}


def test_it_is_an_error_of_the_configuration_when_the_data_are_opened(config: Config) -> None:
    transforms = replace(config.transforms, train={"c": crop(17)})
    with pytest.raises(ConfigError, match=r"transforms\.train\.c\.size: 17 x 17 is larger than"):
        build_data(replace(config, transforms=transforms), ("train",))
