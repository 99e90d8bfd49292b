"""The loop that a person writes, which ours is compared with; it imports torch alone.

As a command it is the bare script that trains for one update and notes the time in a file.
"""

import argparse
import time
from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.utils import clip_grad_norm_
from torch.optim import Optimizer


def updates(
    model: nn.Module,
    optimizer: Optimizer,
    batches: Iterable[Any],
    clip: bool = False,
    bf16_on: str | None = None,
) -> Iterator[tuple[Tensor, Tensor, Tensor, Any]]:
    """Classify; give after each update loss, outputs, labels and, if clipped, the norm.

    bf16_on: the kind of device, for autocast to bfloat16.
    """
    cast: Any = torch.autocast(bf16_on, torch.bfloat16) if bf16_on else nullcontext()
    for inputs, labels in batches:
        with cast:
            outputs = model(inputs)
            loss = cross_entropy(outputs, labels)
        loss.backward()  # type: ignore[no-untyped-call]
        norm = clip_grad_norm_(model.parameters(), 1.0) if clip else None
        optimizer.step()
        optimizer.zero_grad()
        yield loss, outputs, labels, norm


if __name__ == "__main__":
    import torchvision  # noqa: F401 (most scripts have its transforms)

    parser = argparse.ArgumentParser()
    parser.add_argument("mark", type=Path)
    mark = parser.parse_args().mark
    network = nn.Sequential(nn.Flatten(), nn.Linear(256, 128), nn.ReLU(), nn.Linear(128, 10))
    sgd = torch.optim.SGD(network.parameters(), lr=0.1, momentum=0.9)
    list(updates(network, sgd, [(torch.rand(128, 1, 16, 16), torch.zeros(128).long())]))
    mark.write_text(f"{time.time()} {time.process_time()}")
