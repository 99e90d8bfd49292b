"""Copies of tensors as words: the same bits, one group for most dtypes, and no stale memory."""

import pytest
import torch
from torch import Tensor

from trainer.update.copies import Copies
from trainer.update.guard import _as_bool


def tensors() -> list[Tensor]:
    pattern = torch.tensor([0x7F800001, 0x7FC00000, 1], dtype=torch.int32)  # NaNs of two kinds
    return [
        pattern.view(torch.float32),
        torch.tensor(7),
        torch.tensor([2**53 + 1, -1]),
        torch.tensor([0.1, torch.inf], dtype=torch.float64),
        torch.arange(6.0).view(2, 3).t(),  # not contiguous
        torch.tensor([1.5], dtype=torch.bfloat16),
        torch.tensor([True, False]),
        torch.tensor([1 + 2j]),
    ]


def bits(made: list[Tensor]) -> list[list[int]]:
    return [t.contiguous().view(-1).view(torch.uint8).tolist() for t in made]


def test_every_bit_comes_back() -> None:
    made, copies = tensors(), Copies()
    before = bits(made)
    for _ in range(2):
        copies.take(made)
        for tensor in made:
            tensor.zero_()
        copies.restore()
        assert bits(made) == before
    assert len(copies._flat) == 5  # words; floats that are not contiguous; and three of other sizes


def test_former_copies_are_kept_where_the_device_says_so() -> None:
    made, copies, number = tensors(), Copies(), torch.zeros(1)
    flag = _as_bool(number)
    before = bits(made)
    copies.take(made, flag)
    for kept in (False, True):
        number.fill_(kept)
        assert flag.item() is kept
        made[1].fill_(8)
        copies.take(made, flag)
    made[1].fill_(9)
    copies.restore()
    assert made[1] == 8
    number.fill_(1)
    made[1].fill_(10)
    copies.take(made, flag)
    copies.restore()
    made[1].fill_(7)
    assert bits(made) == before


@pytest.mark.parametrize("requires_grad", [False, True])
def test_memory_that_was_replaced_is_copied(requires_grad: bool) -> None:
    tensor, copies = torch.ones(3, requires_grad=requires_grad), Copies()
    copies.take([tensor])
    tensor.data = torch.full((3,), 2.0)
    copies.take([tensor])
    tensor.data.zero_()
    copies.restore()
    assert tensor.tolist() == [2.0, 2.0, 2.0]
