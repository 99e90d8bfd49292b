"""The script that starts are measured against: torch, torchvision, one update."""

import argparse
import time
from pathlib import Path

import torch
import torchvision  # noqa: F401 (most scripts have its transforms)
from torch import nn


def main() -> None:
    """Train for one update, and note when it is done."""
    parser = argparse.ArgumentParser()
    parser.add_argument("mark", type=Path)
    mark = parser.parse_args().mark
    model = nn.Sequential(nn.Flatten(), nn.Linear(256, 128), nn.ReLU(), nn.Linear(128, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    loss = nn.functional.cross_entropy(model(torch.rand(128, 1, 16, 16)), torch.zeros(128).long())
    loss.backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    mark.write_text(f"{time.time()} {time.process_time()}")


if __name__ == "__main__":
    main()
