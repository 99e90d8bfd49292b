"""The shipped data and transforms groups: what composes with what, and what it builds."""

from pathlib import Path
from typing import Any

import pytest
from hydra import compose, initialize_config_dir
from hydra.utils import instantiate
from omegaconf import OmegaConf

from data.images import ImageTensors
from data.transforms import Pipeline

CONF = Path(__file__).parents[2] / "conf"
# The order is the point: `data` after `transforms`, so that a data set may choose its own.
ROOT = """
defaults:
  - transforms: none
  - data: digits
  - _self_
  - optional experiment: null
"""
EXPERIMENT = """# @package _global_
defaults:
  - override /data: cifar10
  - override /transforms: basic
"""


@pytest.fixture
def composed(tmp_path: Path) -> Any:
    """A function from overrides to the composed config, under a root with these two groups."""
    (tmp_path / "experiment").mkdir()
    (tmp_path / "root.yaml").write_text(ROOT)
    (tmp_path / "experiment" / "plain.yaml").write_text(EXPERIMENT)
    for group in ("data", "transforms"):
        (tmp_path / group).symlink_to(CONF / group)

    def run(*overrides: str) -> Any:
        with initialize_config_dir(str(tmp_path), version_base="1.3"):
            config = compose("root", list(overrides))
        return OmegaConf.to_container(config, resolve=True)

    return run


def _names(group: str) -> list[str]:
    return sorted(path.stem for path in (CONF / group).glob("*.yaml"))


@pytest.mark.parametrize(
    ("overrides", "first"),
    [
        pytest.param([], "affine", id="default"),
        pytest.param(["data=cifar10"], "crop", id="data"),
        pytest.param(["data=cifar10", "transforms=basic"], "to_float", id="both"),
        pytest.param(["experiment=plain"], "to_float", id="experiment"),
        pytest.param(["experiment=plain", "transforms=crop_flip"], "crop", id="command-line-wins"),
    ],
)
def test_a_data_set_chooses_transforms_that_others_override(
    composed: Any, overrides: list[str], first: str
) -> None:
    assert next(iter(composed(*overrides)["transforms"]["train"])) == first


@pytest.mark.parametrize("transforms", _names("transforms"))
@pytest.mark.parametrize("data", _names("data"))
def test_every_pair_composes(composed: Any, data: str, transforms: str) -> None:
    config = composed(f"data={data}", f"transforms={transforms}", "data.root=/pictures")
    assert set(config["transforms"]) >= {"train", "eval", "device"}
    assert set(config["data"]) >= {"num_classes", "train", "val", "test", "predict", "on_error"}


@pytest.mark.parametrize("group", ["data", "transforms"])
def test_every_file_opens_with_its_command(group: str) -> None:
    for path in (CONF / group).glob("*.yaml"):
        first = path.read_text().splitlines()[0]
        assert first.startswith("# train experiment="), path
        assert f"{group}" in first, path


def test_digits_as_configured(composed: Any) -> None:
    config = composed("data.image_size=8")
    steps = {name: instantiate(node) for name, node in config["transforms"]["eval"].items()}
    train = instantiate(config["data"]["train"], transform=Pipeline(steps))
    assert isinstance(train, ImageTensors)
    batch = train.batch(range(len(train)))
    assert batch is not None
    assert abs(float(batch[0].mean())) < 0.02
    assert abs(float(batch[0].std()) - 1) < 0.2


@pytest.mark.parametrize("size", [8, 40])
def test_folder_of_any_sizes_as_configured(
    composed: Any, picture_tree: Path, write_image: Any, size: int
) -> None:
    write_image(picture_tree / "train" / "cat" / "tiny.png", size=(1, 1))
    write_image(picture_tree / "train" / "cat" / "wide.png", size=(90, 7))
    config = composed("data=image_folder", f"data.root={picture_tree}", f"data.image_size={size}")
    for stage in ("train", "eval"):
        nodes = config["transforms"][stage]
        pipeline = Pipeline({name: instantiate(node) for name, node in nodes.items()})
        data = instantiate(config["data"]["train"], transform=pipeline)
        assert {tuple(data[i][0].shape) for i in range(len(data))} == {(3, size, size)}
