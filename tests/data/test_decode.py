"""Image files of every kind: right pixels, whole or in part, or an error that names the file."""

import io
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image, ImageOps
from torch import Tensor
from torch.nn.functional import interpolate
from torchvision.transforms import v2

from regimen.conf.check import parse
from regimen.data import decode
from regimen.data.decode import LargeJpeg, fast_resize, open_image, pil_to_tensor, read_image
from regimen.data.errors import DataError, UnreadableError
from regimen.data.transforms import Pipeline
from regimen.scripts.composition.compose import compose
from regimen.trainer.assembly.data import build_pipeline

NAMES = ["a.jpg", "a.png", "a.bmp", "a.gif", "a.webp", "a.tif", "a.ppm"]
MODES = [("CMYK", "jpg"), ("L", "jpg"), ("P", "png"), ("RGBA", "png"), ("LA", "png"), ("1", "png")]
PILLOW_FORMATS = [("RGB", name) for name in NAMES]
OTHER_MODES = [(mode, f"Bild \u00df.{suffix}") for mode, suffix in MODES]


def assert_pixels_are_pillows(path, channels, kind):
    with Image.open(path) as opened:
        expected = np.asarray(opened.convert(kind))

    image = read_image(path, channels)

    assert image.shape == (channels, 10, 12)
    assert image.dtype == torch.uint8
    pixels = image.permute(1, 2, 0).squeeze()
    assert np.array_equal(pixels.numpy(), expected)


@pytest.mark.parametrize(("mode", "name"), [*PILLOW_FORMATS, *OTHER_MODES])
def test_pixels_are_pillows(tmp_path, write_image, mode, name):
    path = write_image(tmp_path / name, mode=mode)
    assert_pixels_are_pillows(path, 3, "RGB")


@pytest.mark.parametrize(("mode", "name"), PILLOW_FORMATS)
def test_grey_pixels_of_a_colour_file_are_pillows(tmp_path, write_image, mode, name):
    path = write_image(tmp_path / name, mode=mode)
    assert_pixels_are_pillows(path, 1, "L")


def test_sixteen_bit_greys_are_scaled_not_cut(tmp_path):
    path = tmp_path / "deep.png"
    values = np.linspace(0, 65535, 64).astype(np.uint16).reshape(8, 8)
    Image.fromarray(values).save(path)

    image = read_image(path, channels=1)

    expected = (values >> 8).astype(np.uint8)
    assert np.array_equal(image[0].numpy(), expected)


@pytest.mark.parametrize("kind", [np.float32, np.int32])
def test_greys_of_no_known_range_are_refused(tmp_path, kind):
    path = tmp_path / "odd.tif"
    values = np.full((4, 4), 100000, kind)
    Image.fromarray(values).save(path)

    with pytest.raises(DataError, match="no known range"):
        read_image(path)


ORIENTATION = 0x0112  # the number of EXIF's tag


@pytest.mark.parametrize("name", ["turned.jpg", "turned.png"])  # torchvision's, Pillow's
def test_exif_orientation_is_applied(tmp_path, name):
    path = tmp_path / name
    exif = Image.Exif()
    exif[ORIENTATION] = 6
    gradient = np.linspace(0, 255, 16 * 32).astype(np.uint8).reshape(16, 32)
    Image.fromarray(gradient).convert("RGB").save(path, exif=exif)

    image = read_image(path)

    assert image.shape == (3, 32, 16)
    assert image[0, 0, -1] < image[0, 0, 0]


RANGES = {
    "12-bits": (np.uint16, 4095, [0, 4095]),
    "10-bits-of-12": (np.uint16, 1023, [0, 4095]),
    "offset": (np.int32, 3000, [-1000, 3000]),
    "floats": (np.float32, 1.0, [0.0, 1.0]),
    "cut": (np.uint16, 4095, [100, 900]),
}


@pytest.mark.parametrize(("kind", "largest", "limits"), RANGES.values(), ids=RANGES)
def test_a_range_divides_deep_greys_into_256_levels(tmp_path, kind, largest, limits):
    path = tmp_path / "deep.tif"
    low, high = limits
    values = np.linspace(min(low, 0), largest, 64).astype(kind).reshape(8, 8)
    Image.fromarray(values).save(path)

    found = read_image(path, 1, limits)

    # Of integers the highest value is a level's last, of floats a level's end.
    end = high if kind is np.float32 else high + 1
    edges = np.linspace(low, end, 257)
    levels = np.searchsorted(edges, values, side="right") - 1
    expected = np.clip(levels, 0, 255)
    assert np.array_equal(found[0].numpy(), expected)


@pytest.mark.parametrize("limits", [None, [0, 4095]], ids=str)
def test_a_file_that_states_its_range_needs_none(tmp_path, limits):
    path = tmp_path / "a.pgm"
    values = (np.arange(64).reshape(8, 8) * 65).astype(np.uint16)
    header = b"P5 8 8 4095\n"
    content = header + values.astype(">u2").tobytes()
    path.write_bytes(content)

    found = read_image(path, 1, limits)

    difference = found[0].numpy().astype(int) - (values >> 4)
    assert np.abs(difference).max() <= 1
    assert decode.read_depth(content, "a.pgm", True).states_range


def _segment(marker, content):
    size = len(content) + 2
    return b"\xff" + bytes([marker]) + size.to_bytes(2, "big") + content


def _exif(turn, order="II", kind=3, more=b""):
    """Return a segment with EXIF's orientation as a number of a TIFF type: 3 SHORT, 4 LONG."""
    byteorder = {"II": "little", "MM": "big"}[order]

    def short(number):
        return number.to_bytes(2, byteorder)

    def long(number):
        return number.to_bytes(4, byteorder)

    value = short(turn) if kind == 3 else long(turn)
    entry = short(ORIENTATION) + short(kind) + long(1) + value.ljust(4, b"\0")
    header = order.encode() + short(42) + long(8)
    directory = short(1) + entry + bytes(4)
    return _segment(0xE1, b"Exif\0\0" + header + directory + more)


def _xmp(attributes=""):
    text = f"<x:xmpmeta xmlns:tiff='t'><rdf:Description {attributes}/></x:xmpmeta>"
    return _segment(0xE1, b"http://ns.adobe.com/xap/1.0/\0" + text.encode())


SEGMENTS = {
    "exif": lambda turn: _exif(turn),
    "big-endian": lambda turn: _exif(turn, "MM"),
    "long": lambda turn: _exif(turn, kind=4),
    "long-big-endian": lambda turn: _exif(turn, "MM", 4),
    "xmp-before": lambda turn: _xmp() + _exif(turn),
    "xmp-says-another": lambda turn: _xmp('tiff:Orientation="3"') + _exif(turn, "MM"),
    "xmp-alone": lambda turn: _xmp(f'tiff:Orientation="{turn}"'),
    "others-before": lambda turn: _segment(0xE2, b"ICC") + _segment(0xFE, b"x") + _exif(turn),
    "padded": lambda turn: b"\xff\xff" + _exif(turn),
    "in-two": lambda turn: _exif(turn) + _exif(9 - turn, "MM"),
    "unknown-value": lambda turn: _exif(turn + 8),
    "no-exif": lambda turn: _segment(0xE1, b"neither") + _segment(0xEF, bytes(turn)),
    "damaged": lambda turn: _segment(0xE1, b"Exif\0\0" + bytes(turn)),
}


def _turned(path):
    """Return the pixels of Pillow's `exif_transpose`; those of the file where it raises."""
    with Image.open(path) as opened:
        plain = opened.convert("RGB")
        try:
            upright = ImageOps.exif_transpose(opened).convert("RGB")
        except Exception:
            upright = plain
        return np.asarray(upright).transpose(2, 0, 1)


@pytest.mark.filterwarnings("ignore:Corrupt EXIF")
@pytest.mark.parametrize("segments", SEGMENTS.values(), ids=SEGMENTS)
@pytest.mark.parametrize("turn", range(1, 9))
def test_a_jpeg_is_turned_as_by_pillow(tmp_path, segments, turn):
    jpeg = _jpeg((20, 30))
    path = tmp_path / "a.jpg"
    path.write_bytes(jpeg[:2] + segments(turn) + jpeg[2:])
    expected = _turned(path)
    assert np.array_equal(read_image(path).numpy(), expected)
    grey = read_image(path, channels=1)  # decoded by Pillow
    assert grey.shape[1:] == expected.shape[1:]


@pytest.mark.filterwarnings("ignore")
def test_what_is_damaged_in_exif_turns_no_picture_otherwise_than_pillow(tmp_path):
    random = np.random.RandomState(2)
    jpeg = _jpeg((20, 30))
    path = tmp_path / "a.jpg"
    builders = list(SEGMENTS.values())[:6]
    compared = 0
    turned = 0
    for number in range(300):
        build = builders[number % 6]
        damaged = bytearray(build(1 + number % 8))
        for _ in range(random.randint(0, 4)):
            place = random.randint(4, len(damaged))
            damaged[place] = random.randint(256)
        path.write_bytes(jpeg[:2] + damaged + jpeg[2:])
        try:
            expected = _turned(path)
        except (OSError, SyntaxError):  # the damage is in a segment's length: Pillow gives up
            continue

        found = read_image(path).numpy()

        assert np.array_equal(found, expected)
        compared += 1
        if expected.shape == (3, 30, 20):
            turned += 1
    assert compared > 200
    assert turned > 30


@pytest.mark.parametrize("turn", range(1, 9))
@pytest.mark.parametrize("name", ["a.png", "a.webp", "a.tif"])
def test_other_formats_are_turned_as_by_pillow(tmp_path, name, turn):
    path = tmp_path / name
    exif = Image.Exif()
    exif[ORIENTATION] = turn
    pixels = np.random.RandomState(0).randint(0, 256, (20, 30, 3), np.uint8)
    options = {"lossless": True} if name == "a.webp" else {}
    Image.fromarray(pixels).save(path, exif=exif, **options)

    found = read_image(path).numpy()

    assert np.array_equal(found, _turned(path))


def _jpeg(size=(64, 64)):
    stream = io.BytesIO()
    noise = np.random.RandomState(0).randint(0, 256, (*size, 3), np.uint8)
    Image.fromarray(noise).save(stream, "jpeg")
    return stream.getvalue()


JPEG = _jpeg()


@pytest.mark.parametrize(
    ("content", "text"),
    [
        pytest.param(b"", "empty", id="nothing"),
        pytest.param(JPEG[: len(JPEG) // 2], "truncated", id="half a file"),
        pytest.param(JPEG[:-1], "truncated", id="without the last byte"),
        pytest.param(JPEG[:20], "cannot decode", id="the first bytes"),
        pytest.param(b"\xff\xd8\xff", "no image format", id="jpeg's mark alone"),
        pytest.param(b"<html>404</html>", "no image format", id="a page"),
        pytest.param(b"\x89PNG\r\n\x1a\n1234", "cannot decode", id="png's mark alone"),
    ],
)
def test_a_broken_file_is_named(tmp_path, content, text):
    path = tmp_path / "broken.jpg"
    path.write_bytes(content)

    with pytest.raises(DataError, match=text) as caught:
        read_image(path)

    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_folder_that_is_called_like_a_file_is_named(tmp_path):
    path = tmp_path / "broken.jpg"
    path.mkdir()

    with pytest.raises(DataError, match="cannot read") as caught:
        read_image(path)

    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_every_truncation_and_flipped_bit_is_an_image_or_a_data_error(tmp_path):
    whole = _jpeg()
    random = np.random.RandomState(1)
    path = tmp_path / "x.jpg"
    messages = []
    for _ in range(150):
        length = random.randint(1, len(whole))
        content = bytearray(whole[:length])
        place = random.randint(length)
        content[place] ^= 1 << random.randint(8)
        path.write_bytes(content)
        try:
            image = read_image(path)
        except DataError as error:
            messages.append(str(error))
        else:
            assert image.dtype == torch.uint8
    assert len(messages) > 100
    for message in messages:
        assert str(path) in message


def test_a_program_named_as_a_picture_is_not_run(tmp_path, monkeypatch):
    from PIL import EpsImagePlugin

    started = []
    monkeypatch.setattr(EpsImagePlugin, "Ghostscript", lambda *words, **_: started.append(words))
    monkeypatch.setattr(EpsImagePlugin, "has_ghostscript", lambda: True)
    header = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n%%EndComments\n"
    (tmp_path / "a.png").write_bytes(header)
    with pytest.raises(DataError, match="no image format"):
        read_image(tmp_path / "a.png", 3)
    assert started == []


@pytest.mark.parametrize("name", ["bomb.jpg", "bomb.png"])
def test_a_bomb_is_refused_by_its_header(tmp_path, write_image, monkeypatch, name):
    path = write_image(tmp_path / name)
    monkeypatch.setattr(decode, "MAX_PIXELS", 100)

    with pytest.raises(DataError, match=r"refused to decode .*bomb.*12 x 10 pixels"):
        read_image(path)


def test_a_bomb_that_is_none_for_pillow_is_refused(tmp_path):
    path = tmp_path / "bomb.jpg"
    jpeg = bytearray(_jpeg())
    frame = jpeg.index(b"\xff\xc0")
    side = (20000).to_bytes(2, "big")
    jpeg[frame + 5 : frame + 9] = side * 2
    path.write_bytes(jpeg)

    with pytest.raises(DataError, match="20000 x 20000"):
        read_image(path)


@pytest.mark.parametrize("stage", ["train", "eval"])
@pytest.mark.parametrize("mode", ["RGB", "L", "P", "CMYK"])
@pytest.mark.parametrize("name", ["resize_crop", "imagenet", "crop_flip", "shift"])
def test_shipped_transforms_take_pictures_of_pillows(name, mode, stage):
    pixels = np.random.RandomState(0).randint(0, 256, (40, 50, 3), np.uint8)
    image = Image.fromarray(pixels).convert(mode)
    data = "digits" if mode == "L" else "cifar10"
    composed = compose([f"transforms={name}", f"data={data}", "data.image_size=32"])
    pipeline = build_pipeline(parse(composed.config), stage)

    torch.manual_seed(0)
    of_picture = pipeline(image)

    torch.manual_seed(0)
    of_tensor = pipeline(pil_to_tensor(image))
    assert of_picture.is_floating_point()
    assert torch.equal(of_picture, of_tensor)


large = pytest.mark.usefixtures("_every_file_is_large")
SIDES = 331, 250  # width and height: no multiples of 8


@pytest.fixture
def _every_file_is_large(monkeypatch):
    monkeypatch.setattr(decode, "LARGE_PIXELS", 1)


@pytest.mark.parametrize("mode", ["RGB", "L", "P", "CMYK"])
def test_a_picture_of_pillows_without_transforms_becomes_bytes(mode):
    image = Image.new("RGB", (50, 40)).convert(mode)
    assert Pipeline({})(image).dtype == torch.uint8


def _smooth(seed=0):
    """Return a picture without detail finer than some 20 pixels."""
    generator = torch.Generator().manual_seed(seed)
    coarse = torch.rand(1, 3, 9, 12, generator=generator) * 255
    fine = interpolate(coarse, SIDES[::-1], mode="bicubic")[0]
    pixels = fine.clamp(0, 255).byte().permute(1, 2, 0)
    return Image.fromarray(pixels.numpy())


def _write(path, turn=1, seed=0):
    exif = Image.Exif()
    exif[ORIENTATION] = turn
    path.parent.mkdir(parents=True, exist_ok=True)
    _smooth(seed).save(path, quality=95, exif=exif)
    return str(path)


@large
@pytest.mark.parametrize("turn", range(1, 9))
@pytest.mark.parametrize(
    "step", [v2.RandomResizedCrop(30), v2.RandomResizedCrop((24, 36)), v2.Resize(60)], ids=repr
)
def test_a_part_is_that_of_the_whole_picture(tmp_path, turn, step):
    path = _write(tmp_path / "a.jpg", turn)
    quick = fast_resize(step)
    decoded_small = 0
    for seed in range(8):
        torch.manual_seed(seed)
        whole = quick(read_image(path))

        torch.manual_seed(seed)
        part = quick(open_image(path))

        assert part.shape == whole.shape
        assert part.dtype == torch.uint8
        difference = (part.int() - whole.int()).abs().float()
        assert difference.mean() < 1.5
        assert difference.max() < 16
        if difference.any():
            decoded_small += 1
    assert decoded_small >= 4  # else this compared a way with itself


@large
@pytest.mark.parametrize(
    "step", [v2.RandomResizedCrop(240), v2.Resize(160), v2.Resize((130, 170))], ids=repr
)
@pytest.mark.parametrize("read", [open_image, read_image])
def test_what_is_not_twice_as_large_is_decoded_whole_to_the_bit(tmp_path, step, read):
    path = _write(tmp_path / "a.jpg")
    quick = fast_resize(step)
    for seed in range(4):
        torch.manual_seed(seed)
        expected = step(read_image(path))

        torch.manual_seed(seed)
        found = quick(read(path))

        assert torch.equal(found, expected)


def test_a_resize_without_antialias_stays_as_it_is():
    step = v2.Resize(160, antialias=False)
    assert fast_resize(step) is step


@large
def test_only_large_plain_jpeg_files_are_left_undecoded(tmp_path, monkeypatch):
    path = _write(tmp_path / "a.jpg")
    assert isinstance(open_image(path), LargeJpeg)
    assert isinstance(open_image(path, channels=1), Tensor)  # the grey of a colour file is Pillow's

    _smooth().save(tmp_path / "a.png")
    _smooth().convert("CMYK").save(tmp_path / "inks.jpg")
    for name in ("a.png", "inks.jpg"):
        opened = open_image(str(tmp_path / name))
        assert torch.equal(opened, read_image(tmp_path / name))

    monkeypatch.setattr(decode, "LARGE_PIXELS", SIDES[0] * SIDES[1] + 1)
    assert isinstance(open_image(path), Tensor)


@large
def test_a_part_of_a_grey_file_has_three_equal_channels(tmp_path):
    path = tmp_path / "grey.jpg"
    _smooth().convert("L").save(path)

    part = open_image(str(path)).part([0, 0, 200, 200], [20, 20])

    assert torch.equal(part[0], part[2])


def test_a_pipeline_whose_first_step_needs_the_whole_image_takes_no_files():
    crop = fast_resize(v2.RandomResizedCrop(30))
    pipeline = Pipeline({"flip": v2.RandomHorizontalFlip(), "crop": crop})
    assert not pipeline.takes_files


@large
def test_a_broken_file_in_part_is_named(tmp_path):
    path = Path(_write(tmp_path / "a.jpg"))
    content = path.read_bytes()
    path.write_bytes(content[:3000])

    file = open_image(str(path))

    assert isinstance(file, LargeJpeg)
    with pytest.raises(UnreadableError, match=r"cannot decode .*a\.jpg: OSError"):
        file.part([0, 0, 200, 200], [20, 20])


@large
def test_a_run_shows_nearly_what_it_would_show_of_whole_files(tmp_path, seen):
    for number in range(10):
        path = tmp_path / "train" / "cat" / f"{number}.jpg"
        _write(path, 1 + number % 8, seed=number)
    words = [
        "experiment=resnet18",
        "data=image_folder",
        f"data.root={tmp_path}",
        "data.val_fraction=0",
        "transforms=imagenet",
        "transforms.train.crop.size=[32,32]",
        "loader.batch_size=4",
    ]

    scaled = seen(*words, "data.decode=scaled")
    whole = seen(*words, "data.decode=full")

    assert len(scaled) == 10
    differences = [(whole[index] - scaled[index]).abs() for index in whole]
    assert any(difference.any() for difference in differences)
    for difference in differences:
        # 1.5 of 255 levels, in units of the standardised picture, whose std is 0.22.
        assert difference.mean().item() < 1.5 / 255 / 0.22
