"""Batches of nested samples keep the types that hold them."""

from collections import namedtuple

import numpy as np
import pytest
import torch

from data.batch import map_leaves
from data.loading.collate import collate

Pair = namedtuple("Pair", "image label")


def test_types_survive() -> None:
    sample = {
        "pair": Pair(torch.ones(2), 3),
        "tuple": (1.5, np.float32(2)),
        "list": [torch.zeros(1), "name"],
        "none": None,
    }
    batch = collate([sample, sample, sample])
    assert isinstance(batch["pair"], Pair)
    assert batch["pair"].image.shape == (3, 2)
    assert batch["pair"].label.tolist() == [3, 3, 3]
    assert isinstance(batch["tuple"], tuple)
    assert batch["tuple"][0].dtype == torch.float64
    assert batch["list"][1] == ["name"] * 3
    assert batch["none"] is None


def test_image_and_class_become_a_tuple_of_tensors() -> None:
    batch = collate([(torch.zeros(3, 2, 2, dtype=torch.uint8), 4)] * 5)
    assert type(batch) is tuple
    assert (batch[0].shape, batch[0].dtype) == ((5, 3, 2, 2), torch.uint8)
    assert batch[1].dtype == torch.int64


@pytest.mark.parametrize(
    "samples",
    [
        pytest.param([(1, 2), (1,)], id="lengths"),
        pytest.param([torch.zeros(2), torch.zeros(3)], id="shapes"),
        pytest.param([None, torch.zeros(2)], id="missing"),
    ],
)
def test_what_does_not_fit_raises(samples: list[object]) -> None:
    with pytest.raises((ValueError, RuntimeError, TypeError, AttributeError)):
        collate(samples)


def test_leaves_are_mapped_in_place_of_themselves() -> None:
    mapped = map_leaves(lambda leaf: leaf * 2, {"a": (1, [2]), "b": Pair(3, 4)})
    assert mapped == {"a": (2, [4]), "b": Pair(6, 8)}
