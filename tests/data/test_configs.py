"""The shipped data and transforms groups: what composes with what, and what it builds."""

import inspect
from pathlib import Path
from typing import Any

import pytest
import torch
from hydra import compose, initialize_config_dir
from hydra.utils import get_object, instantiate
from omegaconf import OmegaConf
from torchvision.transforms import v2

from data.loading.device_transforms import DeviceTransforms
from data.loading.loader import Loader
from data.orders import Sequential
from data.samplers import as_order, as_updates
from data.sources import Digits, ImageTensors
from data.transforms import Pipeline
from data.updates import UpdateSampler

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
    given = {
        "huggingface": ["data.path=d"],
        "huggingface_stream": ["data.path=d", "data.train_length=9", "data.val_length=9"],
        "table": ["data.path=t.csv", "data.target=y", "data.channels=1"],
    }
    words = [f"data={data}", f"transforms={transforms}", "data.root=/pictures"]
    config = composed(*words, *given.get(data, []))
    assert set(config["transforms"]) >= {"train", "eval", "device"}
    assert set(config["data"]) >= {"num_classes", "train", "val", "test", "predict", "on_error"}


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


def _build(nodes: dict[str, Any]) -> dict[str, Any]:
    return {name: instantiate(node) if node else None for name, node in nodes.items()}


@pytest.mark.parametrize("transforms", _names("transforms"))
def test_transforms_run_as_configured(composed: Any, picture_tree: Path, transforms: str) -> None:
    config = composed(
        "data=image_folder",
        f"data.root={picture_tree}",
        "data.num_classes=2",
        f"transforms={transforms}",
        "data.image_size=12",
    )
    nodes = config["transforms"]
    # The trees of these tests hold pictures of 12 x 10: what does not resize, pads.
    resize = {"first": v2.Resize([12, 12])}
    for stage in ("train", "eval"):
        pipeline = Pipeline(resize | _build(nodes[stage]))
        data = instantiate(config["data"]["train"], transform=pipeline)
        sampler = UpdateSampler(Sequential(len(data)), batch_size=4)
        device_nodes = nodes["device"] if stage == "train" else {}
        device = DeviceTransforms(_build(device_nodes), seed=0)
        loader = Loader(data, sampler, seed=0, transforms=device)
        inputs, targets = next(loader.epoch(0)).batch
        assert len(inputs) == len(targets) == 4
        assert inputs.shape[-3] == 3
        assert transforms == "none" or inputs.dtype == torch.float32
        assert targets.shape == ((4, 2) if "mix" in device_nodes else (4,))


@pytest.mark.parametrize("path", sorted((CONF / "loader").glob("*/*.yaml")), ids=lambda p: p.stem)
def test_samplers_run_as_configured(path: Path) -> None:
    node = OmegaConf.to_container(OmegaConf.load(path))
    digits = Digits("val", image_size=8)
    given = {"dataset": digits, "data_source": digits, "seed": 3}
    taken = inspect.signature(get_object(node["_target_"])).parameters
    sampler = instantiate(node, **{k: v for k, v in given.items() if k in taken})
    batches = path.parent.name == "batch_sampler"
    updates = as_updates(sampler, 3) if batches else as_order(sampler, 3)
    epoch = UpdateSampler(updates, batch_size=None if batches else 64)
    indices = [i for t in range(len(epoch)) for i in epoch.pieces(0, t)[0].indices]
    assert 100 < len(indices) <= 1000
    assert max(indices) < len(digits)


def test_the_stream_holds_the_digits(composed: Any) -> None:
    config = composed("data=digits_stream", "transforms=basic")
    steps = _build(config["transforms"]["train"])
    stream = instantiate(config["data"]["train"], transform=Pipeline(steps))
    digits = instantiate(composed()["data"]["train"], transform=Pipeline(steps))
    sampler = UpdateSampler(Sequential(len(stream)), batch_size=500)
    streamed = torch.cat([micro.batch[0] for micro in Loader(stream, sampler, seed=0).epoch(0)])
    assert torch.equal(streamed, digits.batch(range(1257))[0])
