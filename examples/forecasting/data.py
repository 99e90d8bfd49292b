"""Generated measurements of every hour, and windows of them."""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset

from regimen.data.splits import Split

HOURS = 24 * 7 * 52
FIRST_HOURS = {"train": 0, "val": int(0.7 * HOURS), "test": int(0.8 * HOURS)}
ENDS = {"train": FIRST_HOURS["val"], "val": FIRST_HOURS["test"], "test": HOURS}


class HourlyLoad(Dataset[tuple[Tensor, Tensor]]):
    """A year of electric load, in megawatts, and temperature, in degrees Celsius, by the hour.

    Samples are `(past, future)`, (history, 2) and (horizon, 2), in these units: each window of the
    split's hours. The first 70% are train, the next 10% val, the last 20% test. A future lies in
    its split alone; the past of the first ones of val and test lies in the split before.

    mean, std: of each series over the hours of train alone, whatever the split.
    """

    names = ("load", "temperature")

    def __init__(self, split: Split, history: int, horizon: int, seed: int = 0) -> None:
        series = torch.tensor(_generated(seed)).float()
        train = series[: ENDS["train"]]
        self.mean = train.mean(0).tolist()
        self.std = train.std(0).tolist()
        first = max(FIRST_HOURS[split] - history, 0)
        self.series = series[first : ENDS[split]]
        self.history = history
        self.horizon = horizon

    def __len__(self) -> int:
        return len(self.series) - self.history - self.horizon + 1

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        now = index + self.history
        return self.series[index:now], self.series[now : now + self.horizon]


def _generated(seed: int) -> NDArray[np.float64]:
    draws = np.random.RandomState(seed)
    hours = np.arange(HOURS)
    day = 2 * np.pi * hours / 24
    year = 2 * np.pi * hours / HOURS
    weather = _wandering(draws, keeps=0.99)
    temperature = 10 - 9 * np.cos(year) - 4 * np.cos(day - 0.8) + 2.5 * weather
    works = (hours // 24) % 7 < 5
    activity = 60 * works + 90 * np.sin(day - 2) + 35 * np.sin(2 * day) * works
    heating = 6 * np.maximum(16 - temperature, 0)
    load = 700 + 0.01 * hours + activity + heating + 12 * _wandering(draws, keeps=0.8)
    return np.stack([load, temperature], 1)


def _wandering(draws: np.random.RandomState, keeps: float) -> NDArray[np.float64]:
    """Return an autoregressive process of variance 1."""
    steps = draws.normal(size=HOURS) * np.sqrt(1 - keeps**2)
    values = np.zeros(HOURS)
    for hour in range(1, HOURS):
        values[hour] = keeps * values[hour - 1] + steps[hour]
    return values
