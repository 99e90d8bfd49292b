"""JPEG files of which only a box is decoded: the draws and the pixels of the whole picture."""

import io
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor
from torchvision.transforms import v2

from conf.check import parse
from conf.errors import ConfigError
from data import decode
from data.decode import JpegFile, open_image, read_image
from data.errors import UnreadableError
from data.formats import jpeg
from data.loading.batch_forms import quick_form
from scripts.composition.compose import compose
from trainer.build.data import build_data, train_loader

SIDES = 331, 250  # width and height: no multiples of 8


def _by_pillow(data: bytes, channels: int, box: jpeg.Box) -> Any:
    """Do what the library does, slowly."""
    top, left, tall, wide = box
    with Image.open(io.BytesIO(data)) as image:
        pixels = np.asarray(image.convert("L" if channels == 1 else "RGB"))
    return np.array(pixels.reshape(*pixels.shape[:2], -1)[top : top + tall, left : left + wide])


@pytest.fixture(params=["library", "stand_in"], autouse=True)
def _decoder(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Decode by nvImageCodec, and by a stand-in where it is not installed: an extra of 32 MB."""
    if request.param == "library":
        pytest.importorskip("nvidia.nvimgcodec", reason="the extra jpeg is not installed")
    else:
        monkeypatch.setattr(decode, "box_of_jpeg", _by_pillow)
        monkeypatch.setattr("trainer.build.data.region_decoder", lambda: True)


def _detailed(seed: int = 0) -> Image.Image:
    """Return a picture with noise, whose colours differ from pixel to pixel."""
    noise = torch.rand(SIDES[1], SIDES[0], 3, generator=torch.Generator().manual_seed(seed))
    return Image.fromarray((noise * 255).byte().numpy())


def _write(path: Path, turn: int = 1, seed: int = 0, **options: Any) -> str:
    exif = Image.Exif()
    exif[0x0112] = turn
    path.parent.mkdir(parents=True, exist_ok=True)
    _detailed(seed).save(path, "JPEG", exif=exif if turn > 1 else b"", **options)
    return str(path)


def _opened(path: str, channels: int = 3) -> JpegFile:
    file = open_image(path, channels, "region")
    assert isinstance(file, JpegFile)
    return file


@pytest.mark.parametrize(
    ("turn", "options"),
    [
        *[pytest.param(turn, {}, id=f"orientation-{turn}") for turn in range(1, 9)],
        pytest.param(1, {"subsampling": 0}, id="444"),
        pytest.param(1, {"subsampling": 1}, id="422"),
        pytest.param(1, {"progressive": True}, id="progressive"),
        pytest.param(1, {"quality": 100, "optimize": True}, id="best"),
    ],
)
def test_part_is_that_of_the_whole_picture_to_the_bit(
    tmp_path: Path, turn: int, options: dict[str, Any]
) -> None:
    path, quick = _write(tmp_path / "a.jpg", turn, **options), quick_form(v2.RandomResizedCrop(50))
    for seed in range(12):
        torch.manual_seed(seed)
        whole = quick(read_image(path))
        torch.manual_seed(seed)
        assert torch.equal(quick(_opened(path)), whole)


@pytest.mark.parametrize("channels", [1, 3])
def test_grey_file(tmp_path: Path, channels: int) -> None:
    _detailed().convert("L").save(tmp_path / "a.jpg")
    file = _opened(str(tmp_path / "a.jpg"), channels)
    part = file.part((7, 30, 40, 60), (40, 60))
    assert part is not None
    assert torch.equal(part, file.decoded()[:, 7:47, 30:90])


def test_whole_picture_is_left_to_the_decoder_of_whole_ones(tmp_path: Path) -> None:
    file = _opened(_write(tmp_path / "a.jpg"))
    assert file.part((0, 0, file.height, file.width), (20, 20)) is None
    resize = quick_form(v2.Resize(60))
    assert torch.equal(resize(file), v2.Resize(60)(read_image(tmp_path / "a.jpg")))


def test_other_files_are_decoded(tmp_path: Path) -> None:
    _detailed().save(tmp_path / "a.png")
    _detailed().convert("CMYK").save(tmp_path / "inks.jpg")
    for name in ("a.png", "inks.jpg"):
        image = open_image(str(tmp_path / name), 3, "region")
        assert isinstance(image, Tensor)
        assert torch.equal(image, read_image(tmp_path / name))


def test_a_file_without_an_end_is_refused_whatever_the_box(tmp_path: Path) -> None:
    path = Path(_write(tmp_path / "a.jpg"))
    path.write_bytes(path.read_bytes()[:-9000])
    quick = quick_form(v2.RandomResizedCrop(30, scale=(0.01, 0.02)))
    with pytest.raises(UnreadableError, match=r"cannot decode .*a\.jpg"):
        quick(_opened(str(path)))


def _loader(root: Path, how: str, workers: int = 0) -> Any:
    words = [
        "experiment=resnet18",
        "data=image_folder",
        f"data.root={root}",
        "data.val_fraction=0",
        f"data.decode={how}",
        "transforms=imagenet",
        "transforms.train.crop.size=[32,32]",
        "loader.batch_size=4",
        f"loader.num_workers={workers}",
    ]
    alone: Any = SimpleNamespace(
        group=SimpleNamespace(rank=0, world_size=1), device=torch.device("cpu")
    )
    config = parse(compose(words).config)
    return train_loader(config, build_data(config, ("train",)), alone)


def _seen(loader: Any) -> dict[int, Tensor]:
    seen: dict[int, Tensor] = {}
    for micro in loader.epoch(1):
        seen |= dict(zip(micro.piece.indices, micro.batch[0], strict=True))
    loader.close()
    return seen


def test_no_bit_of_what_the_network_sees_changes(tmp_path: Path) -> None:
    for number in range(10):
        _write(tmp_path / "train" / "cat" / f"{number}.jpg", 1 + number % 8, seed=number)
    expected = _seen(_loader(tmp_path, "full"))
    for workers in (0, 2):
        seen = _seen(_loader(tmp_path, "region", workers))
        assert len(seen) == len(expected) == 10
        assert all(torch.equal(seen[index], expected[index]) for index in expected)


def test_missing_package_and_cache_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _write(tmp_path / "train" / "cat" / "a.jpg")
    monkeypatch.setattr("trainer.build.data.region_decoder", lambda: False)
    with pytest.raises(ConfigError, match=r"takes the package nvidia-nvimgcodec.*regimen\[jpeg\]"):
        _loader(tmp_path, "region")
    words = ["data=image_folder", f"data.root={tmp_path}", "data.decode=region", "data.cache=ram"]
    with pytest.raises(ConfigError, match=r"is region, but data\.cache=ram keeps whole"):
        parse(compose(["experiment=resnet18", *words]).config)


def test_parts_for_gpus_that_are_not_installed_are_not_complained_of() -> None:
    code = "from data.formats.jpeg import region_decoder; region_decoder()"
    root = Path(jpeg.__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")
