"""The ranges of a network's activations: of training samples, or learnt in training."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from conf.schema import Config
from data.errors import DataError
from trainer.build.data import build_data, train_loader
from trainer.checkpoints.store import CheckpointStore
from trainer.errors import ModelError
from trainer.export.fake_quantization import LEARNT, Ranges, attach
from trainer.export.places import Places, find_places
from trainer.inference.checkpoint import find_checkpoint
from trainer.inference.run import Run
from trainer.strategies.strategy import Strategy

_BATCH = 32


def calibrated(run: Run, model: nn.Module, checkpoint: str, samples: int) -> Ranges:
    """Return the ranges of a network's values over `samples` training samples.

    These are the first samples of the run's first epoch, with the transforms of evaluation: the
    same in each call. Raises ModelError without the training data.
    """
    forward = _forward(run, checkpoint)
    batches = _training_batches(run.config, samples)
    first = next(batches)
    ranges = Ranges(_places(model, forward, first), torch.device("cpu"))
    ranges.observes = lambda: True
    detach = attach(model, ranges)
    try:
        with torch.inference_mode():
            forward(model, first)
            for batch in batches:
                forward(model, batch)
    finally:
        detach()
    ranges.follow(ranges.seen, 0.0)
    return ranges


def learnt(run: Run, model: nn.Module, checkpoint: str, example: Any) -> Ranges | None:
    """Return the ranges that a run has learnt; None if it has none. Raises ModelError."""
    path = find_checkpoint(run.path, checkpoint)
    state = learnt_state(CheckpointStore(path.parent).load(path))
    if state is None or not state["known"]:
        return None
    ranges = Ranges(_places(model, _forward(run, checkpoint), (example,)), torch.device("cpu"))
    try:
        ranges.load_state_dict(state)
    except ValueError as error:
        raise ModelError(f"{path.name}: {error}") from error
    return ranges


def learnt_state(payload: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return the ranges in a checkpoint, of whichever callback."""
    states = payload["callbacks"].values()
    return next((s[LEARNT] for s in states if isinstance(s, Mapping) and LEARNT in s), None)


def _places(model: nn.Module, forward: Callable[[nn.Module, Any], Any], batch: Any) -> Places:
    places = find_places(model, lambda model: forward(model, batch))
    if not places.layers:
        raise ModelError(
            "the model has no layer that method=static quantizes (Conv1d, Conv2d, Conv3d, Linear, "
            "called once in a forward): method=dynamic may do"
        )
    return places


def _forward(run: Run, checkpoint: str) -> Callable[[nn.Module, Any], Any]:
    task = run.trainer(checkpoint).task
    return lambda model, batch: task.prediction_step(model, batch)


def _training_batches(config: Config, samples: int) -> Iterator[Any]:
    """Yield the first training samples in the order that the seed gives, as in an evaluation."""
    transforms = replace(config.transforms, train=config.transforms.eval, device={})
    loader = replace(
        config.loader,
        batch_size=_BATCH,
        num_workers=0,
        sampler=None,
        batch_sampler=None,
        shuffle=True,
        drop_last=False,
    )
    options = replace(config.trainer, gradient_accumulation_steps=1, overfit_batches=None)
    config = replace(config, transforms=transforms, loader=loader, trainer=options)
    try:
        data = build_data(config, ("train",))
        found = train_loader(config, data, Strategy(torch.device("cpu")))
        for micro in found.epoch(0, 0, min(len(found), -(-samples // _BATCH))):
            yield micro.batch
        found.close()
    except DataError as error:
        raise ModelError(
            f"method=static needs training samples, and the run's data are not there ({error}): "
            "put them back (data.root), or train with callbacks=[default,qat]"
        ) from error
