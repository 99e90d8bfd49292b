"""The recipe of airbench94 as a loop written by hand, its data on the device: the other side."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, pad, unfold

from trainer.optimizers.optimizers import Optimizers

MEAN, STD = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)
Views = list[Tensor]


def train_by_hand(
    config: Any, model: nn.Module, optimizers: Optimizers, parts: Sequence[Tensor]
) -> float:
    """Train on images and labels on their device; return the share of the test images.

    parts: training images (n, C, H, W) and labels, test images and labels. Network and optimizers
    are those of the experiment; batches, augmentation, whitening, rates and the loop are this
    file's own.
    """
    options = config.trainer
    images, labels, test_images, test_labels = parts
    batch, epochs = config.loader.batch_size, options.max_epochs
    mean, std = (torch.tensor(v, device=images.device).view(1, -1, 1, 1) for v in (MEAN, STD))
    train = (images.float() / 255 - mean) / std
    _whiten(model.whiten, train[:5000])  # type: ignore[arg-type]
    mode = options.compile.get("mode") if isinstance(options.compile, dict) else None
    compiled: Any = torch.compile(model, dynamic=False, mode=mode) if options.compile else model
    groups = [group for o in optimizers.optimizers.values() for group in o.param_groups]
    peaks = [group["lr"] for group in groups]
    total, step = len(images) // batch * epochs, 0
    turned = torch.rand(len(images), device=images.device) < 0.5
    for epoch in range(epochs):
        model.whiten.bias.requires_grad_(epoch < int(0.375 * epochs))  # type: ignore[union-attr]
        for inputs, wanted in _batches(train, labels, turned ^ bool(epoch % 2), batch):
            with torch.autocast(images.device.type, torch.bfloat16):
                loss = cross_entropy(compiled(inputs), wanted, label_smoothing=0.2)
            loss.backward()  # type: ignore[no-untyped-call]
            for group, peak in zip(groups, peaks, strict=True):
                group["lr"] = peak * (1 - step / total)
            for optimizer in optimizers.optimizers.values():
                optimizer.step()
                optimizer.zero_grad()
            step += 1
    return _tested(compiled, model, (test_images.float() / 255 - mean) / std, test_labels)


def _batches(
    images: Tensor, labels: Tensor, turned: Tensor, batch: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the batches of an epoch, mirrored where `turned` says so, and moved."""
    samples, side = len(images), images.shape[-1]
    there = torch.arange(side, device=images.device)
    mirrored = torch.where(turned[:, None, None, None], images.flip(-1), images)
    padded = pad(mirrored, (2, 2, 2, 2), mode="reflect")
    order = torch.randperm(samples, device=images.device)
    for rows in order[: samples // batch * batch].split(batch):  # type: ignore[no-untyped-call]
        top, left = torch.randint(5, (2, batch, 1), device=images.device)
        cut = padded[rows].permute(0, 2, 3, 1)
        which = torch.arange(batch, device=images.device)[:, None, None]
        moved = cut[which, (top + there)[:, :, None], (left + there)[:, None]]
        yield moved.permute(0, 3, 1, 2), labels[rows]


@torch.no_grad()
def _whiten(layer: nn.Conv2d, images: Tensor) -> None:
    patches = unfold(images, layer.kernel_size).transpose(1, 2).flatten(0, 1)
    moments = (patches.T @ patches / len(patches)).double().cpu()
    variances, components = torch.linalg.eigh(moments)
    scaled = components.T / (variances + 5e-4).sqrt()[:, None]
    layer.weight.copy_(torch.cat([scaled, -scaled]).view(layer.weight.shape))
    if layer.bias is not None:
        layer.bias.zero_()


@torch.no_grad()
def _tested(compiled: Any, model: nn.Module, images: Tensor, labels: Tensor) -> float:
    """Test by the mean over six views: an image and two shifts of it, and their mirror images."""
    model.eval()
    hits = torch.zeros((), device=images.device)
    for part, wanted in zip(images.split(2000), labels.split(2000), strict=True):  # type: ignore[no-untyped-call]
        around = pad(part, (1, 1, 1, 1), mode="reflect")
        views: Views = [part, around[..., :-2, :-2], around[..., 2:, 2:]]
        with torch.autocast(images.device.type, torch.bfloat16):
            answers = [compiled(v) for view in views for v in (view, view.flip(-1))]
        hits += (sum(answers).argmax(1) == wanted).sum()
    return float(hits) / len(labels)
