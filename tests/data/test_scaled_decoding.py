"""JPEG files that are decoded at a fraction of their size: same draws, nearly the same pixels."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from PIL import Image
from torch import Tensor
from torch.nn.functional import interpolate
from torchvision.transforms import v2

from conf.check import parse
from conf.errors import ConfigError
from data import decode
from data.decode import LargeJpeg, open_image, quick_form, read_image
from data.errors import UnreadableError
from data.image_folder import ImageFolder
from data.transforms import Pipeline
from scripts.composition.compose import compose
from trainer.assembly.data import build_data
from trainer.assembly.experiment import train_loader

SIDES = 331, 250  # width and height: no multiples of 8


@pytest.fixture(autouse=True)
def _every_file_is_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode, "LARGE_PIXELS", 1)


def _smooth(seed: int = 0) -> Image.Image:
    """Return a picture without detail finer than some 20 pixels."""
    coarse = torch.rand(1, 3, 9, 12, generator=torch.Generator().manual_seed(seed)) * 255
    fine = interpolate(coarse, SIDES[::-1], mode="bicubic")[0].clamp(0, 255).byte()
    return Image.fromarray(fine.permute(1, 2, 0).numpy())


def _write(path: Path, turn: int = 1, seed: int = 0) -> str:
    exif = Image.Exif()
    exif[0x0112] = turn
    path.parent.mkdir(parents=True, exist_ok=True)
    _smooth(seed).save(path, quality=95, exif=exif)
    return str(path)


@pytest.mark.parametrize("turn", range(1, 9))
@pytest.mark.parametrize(
    "step", [v2.RandomResizedCrop(30), v2.RandomResizedCrop((24, 36)), v2.Resize(60)], ids=repr
)
def test_part_is_that_of_whole_picture(tmp_path: Path, turn: int, step: Any) -> None:
    path, quick = _write(tmp_path / "a.jpg", turn), quick_form(step)
    scaled = 0
    for seed in range(8):
        torch.manual_seed(seed)
        whole = quick(read_image(path))
        torch.manual_seed(seed)
        part = quick(open_image(path))
        assert (part.shape, part.dtype) == (whole.shape, torch.uint8)
        difference = (part.int() - whole.int()).abs().float()
        assert difference.mean() < 1.5
        assert difference.max() < 16
        scaled += bool(difference.any())
    assert scaled >= 4


def test_scale_follows_from_the_box_and_the_size(tmp_path: Path) -> None:
    path = _write(tmp_path / "a.jpg")
    file, whole = open_image(path), read_image(path)
    assert isinstance(file, LargeJpeg)
    less = file.part([0, 0, 100, 63], [50, 32])  # one column less than twice the size
    part = file.part([0, 0, 100, 64], [50, 32])
    assert torch.equal(less, v2.Resize((50, 32))(whole[:, :100, :63]))
    assert part.shape == (3, 50, 32)
    assert not torch.equal(part, v2.Resize((50, 32))(whole[:, :100, :64]))


@pytest.mark.parametrize(
    "step", [v2.RandomResizedCrop(240), v2.Resize(160), v2.Resize((130, 170))], ids=repr
)
def test_what_is_not_twice_as_large_is_decoded_whole_to_the_bit(tmp_path: Path, step: Any) -> None:
    path, quick = _write(tmp_path / "a.jpg"), quick_form(step)
    for seed in range(4):
        torch.manual_seed(seed)
        expected = step(read_image(path))
        torch.manual_seed(seed)
        assert torch.equal(quick(open_image(path)), expected)


def test_only_large_plain_jpeg_files_are_left_undecoded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = _write(tmp_path / "a.jpg")
    _smooth().save(tmp_path / "a.png")
    _smooth().convert("CMYK").save(tmp_path / "inks.jpg")
    assert isinstance(open_image(path), LargeJpeg)
    for name in ("a.png", "inks.jpg"):
        assert torch.equal(open_image(str(tmp_path / name)), read_image(tmp_path / name))  # type: ignore[arg-type]
    assert isinstance(open_image(path, channels=1), Tensor)  # the grey of a colour file is Pillow's
    monkeypatch.setattr(decode, "LARGE_PIXELS", SIDES[0] * SIDES[1] + 1)
    assert isinstance(open_image(path), Tensor)


def test_grey_file_becomes_colour(tmp_path: Path) -> None:
    _smooth().convert("L").save(tmp_path / "a.jpg")
    file = open_image(str(tmp_path / "a.jpg"))
    assert isinstance(file, LargeJpeg)
    part = file.part([0, 0, 200, 200], [20, 20])
    assert torch.equal(part[0], part[2])


def test_broken_file_is_named(tmp_path: Path) -> None:
    path = Path(_write(tmp_path / "a.jpg"))
    path.write_bytes(path.read_bytes()[:3000])
    file = open_image(str(path))
    assert isinstance(file, LargeJpeg)
    with pytest.raises(UnreadableError, match=r"cannot decode .*a\.jpg: OSError"):
        file.part([0, 0, 200, 200], [20, 20])


def _loader(root: Path, workers: int = 0, accumulation: int = 1, scaled: bool = True) -> Any:
    words = [
        "experiment=resnet18",
        "data=image_folder",
        f"data.root={root}",
        "data.val_fraction=0",
        f"data.decode={'scaled' if scaled else 'full'}",
        "transforms=imagenet",
        "transforms.train.crop.size=[32,32]",
        "loader.batch_size=4",
        f"loader.num_workers={workers}",
        f"trainer.gradient_accumulation_steps={accumulation}",
    ]
    config = parse(compose(words).config)
    alone: Any = SimpleNamespace(
        group=SimpleNamespace(rank=0, world_size=1), device=torch.device("cpu")
    )
    return train_loader(config, build_data(config, ("train",)), alone)


def _seen(loader: Any, epoch: int = 1, start: int = 0) -> dict[int, Tensor]:
    seen: dict[int, Tensor] = {}
    for micro in loader.epoch(epoch, start):
        seen |= dict(zip(micro.piece.indices, micro.batch[0], strict=True))
    loader.close()
    return seen


def test_neither_workers_nor_split_nor_start_change_a_bit(tmp_path: Path) -> None:
    for number in range(10):
        _write(tmp_path / "train" / "cat" / f"{number}.jpg", 1 + number % 8, seed=number)
    expected = _seen(_loader(tmp_path))
    assert len(expected) == 10
    others = [
        _seen(_loader(tmp_path, workers=2)),
        _seen(_loader(tmp_path, accumulation=3)),
        _seen(_loader(tmp_path), start=1),
    ]
    for seen, count in zip(others, (10, 10, 6), strict=True):
        assert len(seen) == count
        assert all(torch.equal(seen[index], expected[index]) for index in seen)
    whole = _seen(_loader(tmp_path, scaled=False))
    assert any(not torch.equal(whole[index], expected[index]) for index in whole)
    assert max((whole[i] - expected[i]).abs().mean().item() for i in whole) < 1.5 / 255 / 0.22


def test_cache_of_whole_images_is_refused(tmp_path: Path) -> None:
    words = ["data=image_folder", f"data.root={tmp_path}", "data.decode=scaled", "data.cache=ram"]
    with pytest.raises(ConfigError, match=r"is scaled, but data\.cache=ram keeps whole"):
        parse(compose(["experiment=resnet18", *words]).config)


def test_a_first_step_that_needs_the_whole_image_gets_it(tmp_path: Path) -> None:
    _write(tmp_path / "cat" / "a.jpg")
    steps = Pipeline({"flip": v2.RandomHorizontalFlip(1.0), "crop": v2.RandomResizedCrop(30)})
    files = ImageFolder(tmp_path, ["cat/a.jpg"], [0], ["cat"], transform=steps)
    files.scaled = True
    torch.manual_seed(0)
    image, _ = files[0]
    torch.manual_seed(0)
    assert torch.equal(image, steps(read_image(tmp_path / "cat" / "a.jpg")))
