"""The data sets of a configuration, opened."""

import random
from pathlib import Path

import numpy as np
import pytest
import torch

from conf.check import parse
from conf.errors import ConfigError
from scripts.composition.compose import compose
from trainer.assembly.data import build_data
from trainer.rng import seed_everything

DRAWN = """
import random
import numpy
import torch

class Drawn:
    def __init__(self, n):
        self.values = [[random.random(), numpy.random.rand(), torch.rand(()).item()]] * n
    def __len__(self):
        return len(self.values)
    def __getitem__(self, index):
        return torch.tensor(self.values[index]), 0
"""


def test_what_a_data_set_draws_when_it_is_opened_is_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "my_drawn.py").write_text(DRAWN)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    line = ["experiment=resnet18", "model=mlp", "transforms=none"]
    line += [f"data.{s}={{_target_: my_drawn.Drawn, n: 3}}" for s in ("train", "val", "test")]
    config = parse(compose(line).config)
    seed_everything(config.seed)
    before = random.random(), np.random.rand(), torch.rand(()).item()
    seed_everything(config.seed)
    of_run = build_data(config).sets  # as a run opens them
    assert (random.random(), np.random.rand(), torch.rand(()).item()) == before
    of_evaluation = build_data(config, ("test",)).sets  # whatever was drawn before
    assert of_run["test"].values == of_evaluation["test"].values
    assert of_run["test"].values != of_run["val"].values != of_run["train"].values


@pytest.mark.parametrize(
    ("steps", "fits"),
    [
        pytest.param("c: {_target_: T.RandomCrop, size: 17}", False, id="a side"),
        pytest.param("c: {_target_: T.RandomCrop, size: 21, padding: 2}", False, id="padded"),
        pytest.param(
            "r: {_target_: T.Resize, size: 12}, c: {_target_: T.RandomCrop, size: 13}",
            False,
            id="resized",
        ),
        pytest.param("c: {_target_: T.RandomCrop, size: 20, padding: 2}", True, id="enough"),
    ],
)
def test_a_crop_larger_than_the_images_is_a_mistake_in_the_configuration(
    steps: str, fits: bool
) -> None:
    steps = steps.replace("T.", "torchvision.transforms.v2.")
    line = ["experiment=resnet18", "model=mlp", "transforms=none", f"transforms.train={{{steps}}}"]
    config = parse(compose(line).config)
    if fits:
        build_data(config, ("train",))
    else:
        with pytest.raises(ConfigError, match=r"transforms\.train\.c failed: .*larger than"):
            build_data(config, ("train",))
