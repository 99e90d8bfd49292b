"""Forecasts by DLinear and a loop of its own.

`python -m examples.forecasting.by_hand SEED` trains on the same series and prints the errors on
the test hours, beside those of last week's values.
"""

import copy
import math
import sys
from collections.abc import Callable, Iterable

import torch
from torch import Tensor
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader

from examples.forecasting.data import HourlyLoad
from examples.forecasting.model import DLinear

Batches = Iterable[tuple[Tensor, Tensor]]
HISTORY = 336
HORIZON = 96


def train_epoch(
    model: DLinear, optimizer: torch.optim.Optimizer, batches: Batches, epoch: int, lr: float = 5e-3
) -> None:
    """Train on batches; from the third epoch on the rate is halved with each."""
    for group in optimizer.param_groups:
        group["lr"] = lr * 0.5 ** max(epoch - 1, 0)
    for past, future in batches:
        optimizer.zero_grad()
        loss = mse_loss(model(past) / model.std, future / model.std)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()


@torch.no_grad()
def errors(
    forecast: Callable[[Tensor], Tensor], batches: Batches, std: Tensor
) -> tuple[float, list[float]]:
    """Return the mean squared error of scaled values, and the absolute one of each series."""
    squares = []
    absolute = []
    for past, future in batches:
        difference = forecast(past) - future
        squares.append((difference / std).square())
        absolute.append(difference.abs())
    return torch.cat(squares).mean().item(), torch.cat(absolute).mean((0, 1)).tolist()


def last_week(past: Tensor) -> Tensor:
    """Forecast what was measured a week before each hour."""
    first = past.shape[1] - 7 * 24
    return past[:, first : first + HORIZON]


def main() -> None:
    """Train, take the network of the best validation, and print its errors."""
    torch.manual_seed(int(sys.argv[1]))
    train = HourlyLoad("train", HISTORY, HORIZON)
    batches = DataLoader(train, batch_size=32, shuffle=True)
    val = DataLoader(HourlyLoad("val", HISTORY, HORIZON), batch_size=256)
    test = DataLoader(HourlyLoad("test", HISTORY, HORIZON), batch_size=256)
    model = DLinear(HISTORY, HORIZON, train.mean, train.std)
    optimizer = torch.optim.Adam(model.parameters())
    best_loss = math.inf
    best = model
    for epoch in range(5):
        train_epoch(model, optimizer, batches, epoch)
        loss, _ = errors(model, val, model.std)
        if loss < best_loss:
            best_loss = loss
            best = copy.deepcopy(model)
    print("last week: loss {:.4f}, mae {}".format(*errors(last_week, test, model.std)))
    print("DLinear: loss {:.4f}, mae {}".format(*errors(best, test, model.std)))


if __name__ == "__main__":
    main()
