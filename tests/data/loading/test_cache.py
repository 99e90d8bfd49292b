"""`data.cache`: the same samples, decoded once, in memory, in a file or on the device."""

import os
import pickle

import pytest
import torch

from regimen.data.decode import read_image
from regimen.data.errors import UnreadableError
from regimen.data.image_folder import ImageCache, image_folder
from regimen.data.loading.loader import DeviceCache
from regimen.data.sources import Digits
from toys import differences

KINDS = ["ram", "disk"]


def _open(tree, kind, most_bytes=10**6):
    files = image_folder(str(tree), "train", val_fraction=0)
    assert files is not None
    files.cache = ImageCache(kind, tree / ".cache", most_bytes)
    return files


def _filled(tree, kind, most_bytes=10**6):
    files = _open(tree, kind, most_bytes)
    files.fill_cache(lambda: False)
    return files


def _files_of(tree, pattern="*.images"):
    return sorted((tree / ".cache").glob(pattern))


def _image(files, index):
    image, _ = files[index]
    return image


@pytest.mark.parametrize("kind", KINDS)
def test_images_of_any_size_are_those_of_the_files(picture_tree, write_image, kind):
    write_image(picture_tree / "train" / "cat" / "wide.png", size=(19, 7))

    files = _filled(picture_tree, kind)

    for index in range(len(files)):
        assert torch.equal(_image(files, index), read_image(files.path(index)))
    images, targets = files.batch([3, 1, 12])
    assert torch.equal(images, torch.stack([_image(files, index) for index in (3, 1, 12)]))
    assert targets.tolist() == [0, 0, 1]
    assert files.batch([0, 10]) is None  # of two sizes


@pytest.mark.parametrize("kind", KINDS)
def test_images_need_no_files_and_are_nobodys_to_change(picture_tree, kind):
    files = _filled(picture_tree, kind)
    expected = _image(files, 2).clone()

    _image(files, 2).zero_()  # a transform may write to its image
    for path in (picture_tree / "train").rglob("*.jpg"):
        path.unlink()

    in_worker = pickle.loads(pickle.dumps(files))
    assert torch.equal(_image(files, 2), expected)
    assert torch.equal(_image(in_worker, 2), expected)


@pytest.mark.parametrize("kind", KINDS)
def test_broken_images_fail_as_without_a_cache(picture_tree, kind):
    (picture_tree / "train" / "cat" / "03.jpg").write_bytes(b"no image")

    files = _filled(picture_tree, kind)

    with pytest.raises(UnreadableError, match=r"03\.jpg"):
        files[3]
    assert files.batch([2, 3]) is None
    assert torch.equal(_image(files, 4), read_image(files.path(4)))


CACHE_FILES = "*.*[st]"  # *.images, *.part


@pytest.mark.parametrize("kind", KINDS)
def test_images_that_do_not_fit_the_cache_are_decoded_each_time(picture_tree, kind, caplog):
    files = _filled(picture_tree, kind, most_bytes=1000)

    assert "more than data.cache_bytes=1000" in caplog.text
    assert files.batch([0]) is None
    assert _image(files, 0).shape == (3, 10, 12)
    assert _files_of(picture_tree, CACHE_FILES) == []


def test_without_a_folder_for_the_cache_images_are_decoded_each_time(picture_tree, caplog):
    (picture_tree / ".cache").write_text("a file")

    files = _filled(picture_tree, "disk", most_bytes=1000)

    assert "data.cache=disk: the decoded" in caplog.text
    assert files.batch([0]) is None
    assert _image(files, 0).shape == (3, 10, 12)
    assert _files_of(picture_tree, CACHE_FILES) == []


def test_a_second_run_reuses_the_cache(picture_tree):
    _filled(picture_tree, "disk")
    (path,) = _files_of(picture_tree)
    before = path.stat().st_ino

    _filled(picture_tree, "disk")

    (path,) = _files_of(picture_tree)
    assert path.stat().st_ino == before


def test_a_torn_cache_is_made_again(picture_tree):
    _filled(picture_tree, "disk")
    (path,) = _files_of(picture_tree)
    content = path.read_bytes()
    path.write_bytes(content[:-100])

    files = _filled(picture_tree, "disk")

    assert torch.equal(_image(files, 5), read_image(files.path(5)))
    assert files.batch([5]) is not None


def test_of_the_caches_of_images_that_changed_the_oldest_give_way(picture_tree):
    _filled(picture_tree, "disk")
    # 16 pictures of 3 x 12 x 10 bytes, and an entry of the index for each; twice.
    room = 2 * 16 * (3 * 12 * 10 + 16)
    for number in (1, 2, 3):
        os.utime(picture_tree / "train" / "cat" / "00.jpg", ns=(number, number))
        _filled(picture_tree, "disk", most_bytes=room)
        assert len(_files_of(picture_tree)) == 2


@pytest.mark.parametrize("kind", KINDS)
def test_an_interruption_leaves_nothing_and_the_next_call_begins_anew(picture_tree, kind):
    files = _open(picture_tree, kind)

    files.fill_cache(lambda: True)
    assert files.batch([0]) is None
    assert _files_of(picture_tree, CACHE_FILES) == []

    files.fill_cache(lambda: False)
    assert files.batch([0]) is not None


def _seen(loader):
    """Return what the network sees of an epoch from its second update on."""
    micros = [(micro.batch_slice, micro.batch) for micro in loader.epoch(1, 1, 4)]
    loader.close()
    return micros


@pytest.mark.parametrize(
    "words",
    [
        ["experiment=resnet18"],
        ["experiment=resnet18", "transforms=on_device"],
        ["experiment=resnet18", "transforms=mirrored"],
        ["experiment=resnet18", "transforms=mixup"],
        ["experiment=segmentation"],
    ],
    ids=lambda words: words[-1].partition("=")[2],
)
def test_a_device_cache_gives_the_same_batches(words, built):
    words = [
        *words,
        "loader.batch_size=12",
        "loader.eval_batch_size=5",
        "loader.num_workers=0",
        "trainer.gradient_accumulation_steps=2",
    ]
    plain_loaders = built(*words, "data.cache=none", rank=1, world=2)
    kept_loaders = built(*words, "data.cache=device", rank=1, world=2)

    for plain, kept in zip(plain_loaders, kept_loaders, strict=True):
        expected = _seen(plain)
        assert expected
        assert differences(_seen(kept), expected) == []
        assert kept.kept is not None
        assert kept.kept.ready


def test_a_data_set_above_cache_bytes_stays_in_host_memory(caplog):
    digits = DeviceCache(Digits("val"), torch.device("cpu"), 1000)
    digits.fill()
    assert not digits.ready
    assert "its samples take 71280 bytes, more than data.cache_bytes=1000" in caplog.text
