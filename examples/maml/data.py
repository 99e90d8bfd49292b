"""Sine waves to be learnt from a few points; one sample is one wave."""

import math
from typing import Literal

import torch
from torch import Tensor

Sample = tuple[tuple[Tensor, Tensor, Tensor], Tensor]


class Sines:
    """`count` waves with an amplitude of 0.1 to 5 and a phase of 0 to pi, on [-5, 5].

    A sample is ((support x, support y, query x), query y): `shots` points to learn from, each
    tensor [shots, 1], and as many to be predicted, [shots].
    """

    concurrent = True  # nothing is prepared: processes may open it at once

    def __init__(
        self, split: Literal["train", "val", "test"], count: int, shots: int = 10, seed: int = 0
    ) -> None:
        number = ("train", "val", "test").index(split)
        generator = torch.Generator().manual_seed(3 * seed + number)
        amplitude = 0.1 + 4.9 * torch.rand(count, 1, 1, generator=generator)
        phase = math.pi * torch.rand(count, 1, 1, generator=generator)
        self._x = 10 * torch.rand(count, 2 * shots, 1, generator=generator) - 5
        self._y = amplitude * torch.sin(self._x - phase)
        self._shots = shots

    def __len__(self) -> int:
        return len(self._x)

    def __getitem__(self, index: int) -> Sample:
        support_x, query_x = torch.split(self._x[index], self._shots)
        support_y, query_y = torch.split(self._y[index], self._shots)
        return (support_x, support_y, query_x), query_y.squeeze(1)
