"""What a person writes for torchrun: the reference of the benchmark `ddp` for the start."""

import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
from torch.utils.tensorboard import SummaryWriter
from torchvision.transforms import v2
from tqdm import tqdm


def main() -> None:
    """Train for one update, and write down when that is done."""
    dist.init_process_group("gloo")
    digits = load_digits()
    shift = v2.RandomAffine(0, translate=(0.1, 0.1))
    images = torch.tensor(digits.images, dtype=torch.float32)
    samples = TensorDataset(images, torch.tensor(digits.target))
    loader = DataLoader(samples, 32, sampler=DistributedSampler(samples))
    layers = [nn.Flatten(), nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10)]
    model = DistributedDataParallel(nn.Sequential(*layers))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    writer = (
        SummaryWriter(str(Path(sys.argv[1]).with_name("plain"))) if not dist.get_rank() else None
    )
    for inputs, labels in tqdm(loader, disable=dist.get_rank() > 0):
        loss = cross_entropy(model(shift(inputs)), labels)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        if writer is not None:
            writer.add_scalar("train/loss", loss.item(), 1)
            Path(sys.argv[1]).write_text(str(time.time()))
        break
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
