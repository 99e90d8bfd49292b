"""Masks, generated images and text, the graph and the texts of a run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import Tensor, nn

from callbacks.pictures import picture as drawing
from callbacks.pictures.generated import GeneratedImages, GeneratedText
from callbacks.pictures.model import Graph, Texts
from callbacks.pictures.samples import Masks, overlay
from callbacks.support import CallbackError
from callbacks.tensorboard import TensorBoard
from toy_pictures import Gallery, trainer_of
from trainer.optimizers.optimizers import Optimizers
from trainer.tasks.gan import GAN
from trainer.tasks.language_model import LanguageModel
from trainer.tasks.segmentation import Segmentation


def test_masks_lie_over_their_images() -> None:
    generator = torch.Generator().manual_seed(0)
    batches = [
        (torch.rand(4, 1, 8, 8, generator=generator), torch.randint(3, (4, 8, 8))) for _ in range(2)
    ]
    gallery = Gallery()
    trainer_of(
        {"g": gallery, "m": Masks(count=2)},
        task=Segmentation(3),
        model=nn.Conv2d(1, 3, 1),
        train=batches,
        val=batches,
        max_epochs=1,
    ).fit()
    height, width, _ = gallery.shown["masks/val"][0][1].shape
    assert width == 3 * (96 + 4) + 4  # image, label and prediction of a sample in a row
    assert height > 2 * 96
    grey = torch.full((3, 2, 2), 50, dtype=torch.uint8)
    painted = overlay(grey, torch.tensor([[0, 1], [2, 255]]), 3)
    assert torch.equal(painted[:, 0, 0], grey[:, 0, 0])  # the background stays as it is
    assert len({tuple(pixel) for pixel in painted.flatten(1).T.tolist()}) == 4


class Pair(nn.Module):
    """A generator and a discriminator of a layer each."""

    def __init__(self) -> None:
        super().__init__()
        self.generator, self.discriminator = nn.Linear(5, 16), nn.Linear(16, 1)

    def forward(self, inputs: Tensor, part: str) -> Tensor:
        if part == "generator":
            made: Tensor = self.generator(inputs).view(-1, 1, 4, 4)
            return made
        judged: Tensor = self.discriminator(inputs.flatten(1))
        return judged


def test_generated_images_come_from_the_same_noise_each_time() -> None:
    noise = torch.randn(2, 5, generator=torch.Generator().manual_seed(3))
    batches = [(torch.rand(2, 1, 4, 4), noise)]
    gallery = Gallery()

    def two(model: Any) -> Optimizers:
        parts = {"discriminator": model.discriminator, "generator": model.generator}
        names = {parameter: name for name, parameter in model.named_parameters()}
        made = {name: torch.optim.SGD(part.parameters(), 0.1) for name, part in parts.items()}
        return Optimizers(made, names)

    run = trainer_of(
        {"g": gallery, "made": GeneratedImages()},
        task=GAN(),
        model=Pair(),
        train=batches,
        val=batches,
        optimizer=two,
        max_epochs=1,
    )
    run.fit()
    expected = drawing.sheet(drawing.pixels(run.model(noise, part="generator")), columns=8)
    assert np.array_equal(gallery.shown["generated/val"][0][1], expected)


class Bigram(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(4, 4)

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.table(tokens)
        return logits


def test_text_is_written_from_a_prompt_and_draws_nothing_from_the_training(tmp_path: Path) -> None:
    tokens = torch.randint(4, (3, 9), generator=torch.Generator().manual_seed(0))
    batches = [(tokens[:, :-1], tokens[:, 1:])]
    (tmp_path / "inference.json").write_text(json.dumps({"classes": ["a", "b", "c", "d"]}))
    states, texts = [], []
    for length in (1, 30):
        gallery = Gallery()
        text = GeneratedText(count=1, prompt=4, length=length)
        run = trainer_of(
            {"g": gallery, "text": text},
            tmp_path,
            task=LanguageModel(4),
            model=Bigram(),
            train=batches,
            val=batches,
            max_epochs=1,
        )
        run.fit()
        states.append(torch.get_rng_state())
        texts.append(gallery.shown["generated/text"][0][1])
    prompt = "".join("abcd"[i] for i in tokens[0, :4].tolist())
    assert [len(text) for text in texts] == [4 + 4 + 1, 4 + 4 + 30]
    assert all(text.startswith(f"    {prompt}") for text in texts)
    assert torch.equal(*states)


def test_texts_of_a_run_are_logged_once(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("seed: 3\n")
    (tmp_path / "overrides.yaml").write_text("- seed=3\n")
    gallery = Gallery()
    trainer_of({"texts": Texts(), "g": gallery}, tmp_path, max_epochs=2).fit()
    texts = {name: shown for name, ((_, shown),) in gallery.shown.items()}
    assert texts["run/config"] == "    seed: 3"
    assert texts["run/overrides"] == "    - seed=3"
    assert "updates 6" in texts["run/plan"]


def test_a_graph_needs_tensorboard_and_a_model_that_can_be_traced(
    make_trainer: Any, tmp_path: Path, caplog: Any
) -> None:
    with pytest.raises(CallbackError, match=r"callbacks\.graph needs callbacks\.tensorboard"):
        make_trainer({"graph": Graph()}).fit()

    class Untraceable(nn.Linear):
        def forward(self, inputs: Tensor) -> Tensor:
            if torch.jit.is_tracing():
                raise RuntimeError("not this one")
            return super().forward(inputs)

    callbacks = {"tensorboard": TensorBoard(), "graph": Graph()}
    make_trainer(callbacks, tmp_path / "a", model=Untraceable(4, 2).double()).fit()
    (warning,) = (record.getMessage() for record in caplog.records)
    assert warning == "callbacks.graph: the model cannot be traced: not this one"

    make_trainer({"tensorboard": TensorBoard(), "graph": Graph()}, tmp_path / "b").fit()
    board = EventAccumulator(str(tmp_path / "b" / "tensorboard"))
    assert any("Linear" in node.name for node in board.Reload().Graph().node)
