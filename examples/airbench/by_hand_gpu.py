"""The recipe of airbench94 as a loop written by hand, its data on the device: the other side."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, pad, unfold

MEAN, STD = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)
Views = list[Tensor]


def train_by_hand(config: Any, model: nn.Module, parts: Sequence[Tensor]) -> float:
    """Train on images and labels on their device; return the share of the test images.

    parts: training images (n, C, H, W) and labels, test images and labels. Network and numbers are
    those of the experiment; batches, augmentation, whitening, optimizers, rates and the loop are
    this file's own.
    """
    options = config.trainer
    images, labels, test_images, test_labels = parts
    batch, epochs = config.loader.batch_size, options.max_epochs
    mean, std = (torch.tensor(v, device=images.device).view(1, -1, 1, 1) for v in (MEAN, STD))
    train, test = (_rows_last((i.float() / 255 - mean) / std) for i in (images, test_images))
    _whiten(model.whiten, train[:5000])  # type: ignore[arg-type]
    mode = options.compile.get("mode") if isinstance(options.compile, dict) else None
    compiled: Any = torch.compile(model, dynamic=False, mode=mode) if options.compile else model
    optimizers = Optimizers(config.optimizer, model, bool(options.compile))
    total, step = len(images) // batch * epochs, 0
    turned = torch.rand(len(images), device=images.device) < 0.5
    for epoch in range(epochs):
        model.whiten.bias.requires_grad_(epoch < int(0.375 * epochs))  # type: ignore[union-attr]
        for inputs, wanted in _batches(train, labels, turned ^ bool(epoch % 2), batch):
            with torch.autocast(images.device.type, torch.bfloat16):
                loss = cross_entropy(compiled(inputs), wanted, label_smoothing=0.2)
            loss.backward()  # type: ignore[no-untyped-call]
            optimizers.step(1 - step / total)
            step += 1
    return _tested(compiled, model, test, test_labels)


class Optimizers:
    """Muon for the kernels, kept at a norm of sqrt(filters), and SGD for biases and head."""

    def __init__(self, node: Any, model: nn.Module, compiles: bool) -> None:
        muon, sgd = node["optimizers"]["muon"], node["optimizers"]["sgd"]
        trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self.kernels = [p for p in trained.values() if p.ndim == 4]
        self.momenta = [torch.zeros_like(p) for p in self.kernels]
        self.lr, self.momentum = node["lr"], muon["momentum"]
        self.iterations = muon["ns_steps"]
        self.orthogonal: Any = (
            torch.compile(_orthogonal, dynamic=False) if compiles else _orthogonal
        )
        head = sgd["param_groups"]["head"]
        biases = [p for p in trained.values() if p.ndim == 1]
        groups = [
            {"params": biases, "lr": sgd["lr"], "weight_decay": sgd["weight_decay"]},
            {
                "params": [trained["head.weight"]],
                "lr": head["lr"],
                "weight_decay": head["weight_decay"],
            },
        ]
        fused = biases[0].is_cuda
        self.sgd = torch.optim.SGD(groups, momentum=sgd["momentum"], nesterov=True, fused=fused)
        self.peaks = [group["lr"] for group in self.sgd.param_groups]

    @torch.no_grad()
    def step(self, share: float) -> None:
        """Apply the gradients with this share of the learning rates, and drop them."""
        for kernel, momentum in zip(self.kernels, self.momenta, strict=True):
            assert kernel.grad is not None
            momentum.mul_(self.momentum).add_(kernel.grad)
            ahead = kernel.grad.add(momentum, alpha=self.momentum).flatten(1)
            kernel.mul_(len(kernel) ** 0.5 / kernel.norm())
            moved = self.orthogonal(ahead, self.iterations).view(kernel.shape)
            kernel.sub_(moved, alpha=self.lr * share)
            kernel.grad = None
        for group, peak in zip(self.sgd.param_groups, self.peaks, strict=True):
            group["lr"] = peak * share
        self.sgd.step()
        self.sgd.zero_grad()


def _orthogonal(matrix: Tensor, iterations: int) -> Tensor:
    """Return about U V^T of a matrix U S V^T, by Newton-Schulz iterations in bfloat16."""
    tall = matrix.shape[0] > matrix.shape[1]
    x: Tensor = matrix.bfloat16().T if tall else matrix.bfloat16()
    x = x / (x.norm() + 1e-7)
    for _ in range(iterations):
        gram = x @ x.T
        x = 3.4445 * x + (2.0315 * gram @ gram - 4.775 * gram) @ x
    return x.T if tall else x


def _rows_last(images: Tensor) -> Tensor:
    return images.contiguous(memory_format=torch.channels_last)


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
