"""Fingerprints: the same for the same data, another for another."""

from pathlib import Path

from data.image_folder import image_folder
from data.sources import Digits, fingerprint


def test_fingerprints_tell_data_apart() -> None:
    digits = fingerprint(Digits("val"))
    assert digits == fingerprint(Digits("val"))
    others = [Digits("test"), Digits("val", image_size=8), Digits("val", split_seed=1), [1, 2]]
    assert len({digits, *map(fingerprint, others)}) == 5
    changed = Digits("val")
    changed.images[3, 0, 2, 2] += 1
    assert fingerprint(changed) != digits


def test_folders_are_told_apart_by_names(picture_tree: Path) -> None:
    before = fingerprint(image_folder(str(picture_tree), "train"))
    assert before == fingerprint(image_folder(str(picture_tree), "train"))
    (picture_tree / "train" / "cat" / "00.jpg").rename(picture_tree / "train" / "cat" / "zz.jpg")
    assert before != fingerprint(image_folder(str(picture_tree), "train"))


def test_a_data_set_may_know_better() -> None:
    class Own:
        def fingerprint(self) -> str:
            return "version 3"

    assert fingerprint(Own()) == "version 3"
