"""K-fold cross-validation over every shipped source."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from conf.check import parse
from conf.errors import ConfigError
from data.sources import Diabetes, Digits
from data.text import StandardLibraryText
from scripts.composition.compose import compose
from trainer.assembly.check import check_targets
from trainer.assembly.data import build_data

FOLDS = 3


def sizes(*overrides: str) -> list[int]:
    config = parse(compose(list(overrides)).config)
    return [len(dataset) for dataset in build_data(config).sets.values() if dataset is not None]


@pytest.mark.parametrize(
    ("data", "pool"),
    [
        pytest.param("digits", 1527, id="digits"),
        pytest.param("digits_noise", 1527, id="nested"),
        pytest.param("digits_stream", 1527, id="stream"),
        pytest.param("digit_masks", 1527, id="scenes"),
        pytest.param("diabetes", 376, id="table"),
    ],
)
def test_train_and_val_are_shared_out_and_test_stays(data: str, pool: int) -> None:
    plain = sizes(f"data={data}", "transforms=none")
    shared = [
        sizes(f"data={data}", "transforms=none", f"data.fold={k}", f"data.folds={FOLDS}")
        for k in range(FOLDS)
    ]
    assert {train + val for train, val, _ in shared} == {pool} == {plain[0] + plain[1]}
    assert sum(val for _, val, _ in shared) == pool
    assert {test for *_, test in shared} == {plain[2]}


def test_the_folds_of_a_table_hold_every_patient_once() -> None:
    order = torch.cat([Diabetes("val", fold=k, folds=FOLDS).values for k in range(FOLDS)])
    plain = torch.cat([Diabetes("val").values, Diabetes("train").values])
    assert len(order) == len(plain)
    tests = [Diabetes("test", fold=k, folds=FOLDS).values.numpy() for k in range(FOLDS)]
    ranks = [np.argsort(np.argsort(values)) for values in tests]
    assert all(np.array_equal(ranks[0], other) for other in ranks)


def test_the_folds_of_a_text_hold_every_string_once() -> None:
    options: dict[str, Any] = {"context": 8, "modules": ["statistics"]}
    shared = [StandardLibraryText("val", fold=k, folds=2, **options) for k in range(2)]
    plain = [StandardLibraryText(split, **options) for split in ("train", "val")]
    total = sum(len(part.tokens) for part in plain)
    assert sum(len(part.tokens) for part in shared) == pytest.approx(total, abs=4)


def test_the_folds_of_digits_are_stratified_and_follow_split_seed() -> None:
    val = Digits("val", 8, fold=1, folds=5)
    assert val.targets.bincount().min() >= 29
    other = Digits("val", 8, split_seed=1, fold=1, folds=5)
    assert not torch.equal(val.images, other.images)


def test_the_folds_of_a_folder_are_cut_from_train(tmp_path: Path) -> None:
    for place in ("train/cat", "train/dog", "val/cat", "val/dog"):
        for n in range(4):
            path = tmp_path / place / f"{n}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.touch()
    given = ["data=image_folder", f"data.root={tmp_path}", "transforms=none"]
    assert sizes(*given) == [8, 8]
    assert sizes(*given, "data.fold=1", "data.folds=4") == [6, 2]


@pytest.mark.parametrize(
    ("overrides", "text"),
    [
        pytest.param(["data.fold=5", "data.folds=5"], "data.fold: is 5.* folds 0 to 4", id="high"),
        pytest.param(["data.fold=1"], "data.folds: missing", id="no-number"),
        pytest.param(["data.folds=4"], "data.fold: missing.* folds 0 to 3", id="no-fold"),
        pytest.param(["data.fold=0", "data.folds=2", "~data.val"], "data.val is null", id="no-val"),
        pytest.param(
            [
                "data.fold=0",
                "data.folds=2",
                "data.train={_target_: torch.utils.data.TensorDataset}",
            ],
            "data.folds: data.train: .*TensorDataset has no folds",
            id="a-source-without",
        ),
    ],
)
def test_folds_that_cannot_be(overrides: list[str], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        check_targets(parse(compose(overrides).config))
