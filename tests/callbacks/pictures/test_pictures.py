"""Pictures are shown at their intervals, and the training does not notice them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from callbacks.histograms import Histograms
from callbacks.metrics_log import MetricsLog
from callbacks.pictures.classes import ConfusionMatrix, PRCurves
from callbacks.pictures.generated import GeneratedImages, GeneratedText
from callbacks.pictures.model import Graph, LayerStatistics, Texts
from callbacks.pictures.picture import is_due, matrix, sheet
from callbacks.pictures.samples import Masks, Misclassified, TrainingSamples, ValidationSamples
from callbacks.tensorboard import TensorBoard
from toy_pictures import Gallery, trainer_of
from trainer import rng
from trainer.callback import Callback
from trainer.trainer import Trainer


def everything() -> dict[str, Callback]:
    return {
        "texts": Texts(),
        "train": TrainingSamples(),
        "val": ValidationSamples(),
        "wrong": Misclassified(),
        "confusion": ConfusionMatrix(),
        "curves": PRCurves(),
        "histograms": Histograms(),
        "layers": LayerStatistics(2),
        "graph": Graph(),
    }


def test_no_bit_of_the_training_changes(tmp_path: Path) -> None:
    runs = {}
    for name, callbacks in (("bare", {}), ("shown", everything())):
        (tmp_path / name).mkdir()
        board = {"log": MetricsLog(), "board": TensorBoard()}
        run = trainer_of({**board, **callbacks}, tmp_path / name)
        run.fit()
        runs[name] = run, rng.capture()
    (bare, before), (shown, after) = runs["bare"], runs["shown"]
    for key, value in bare.model.state_dict().items():
        assert torch.equal(value, shown.model.state_dict()[key]), key
    assert torch.equal(before["torch"], after["torch"])
    assert before["python"]["gauss_next"] == after["python"]["gauss_next"]
    assert torch.equal(before["python"]["internal"], after["python"]["internal"])
    assert torch.equal(before["numpy"]["keys"], after["numpy"]["keys"])

    def logged(name: str) -> list[dict[str, float]]:
        text = (tmp_path / name / "metrics.jsonl").read_text().splitlines()
        own = ("grad_norm/", "update_ratio/")
        return [{k: v for k, v in json.loads(x).items() if not k.startswith(own)} for x in text]

    assert logged("bare") == logged("shown")


def test_each_is_shown_at_its_own_interval_and_by_default_ever_less_often() -> None:
    gallery = Gallery()
    callbacks = {
        "gallery": gallery,
        "train": TrainingSamples(every_n_epochs=3),
        "val": ValidationSamples(),
        "confusion": ConfusionMatrix(every_n_validations=2),
    }
    trainer_of(callbacks, max_epochs=7, log_every_n_steps=3).fit()
    assert gallery.steps("samples/train") == [9, 18]  # epochs 3 and 6
    assert gallery.steps("samples/val") == [3, 12, 21]  # the 1st, the 4th and the last
    assert gallery.steps("confusion/counts") == [6, 12, 18]
    assert [n for n in range(1, 20) if is_due(n, None)] == [1, 4, 16]


def test_names_and_numbers_are_written_at_their_places() -> None:
    names = ["cat", "dog", "a very long name"]
    blank, written = (matrix(np.eye(3) * 7, n) for n in (["", "", ""], names))
    assert matrix(np.zeros((3, 3)), names).shape == written.shape
    dark = (written < 90).all(2)
    assert dark[:60].any()  # above the columns
    assert dark[60:, :60].any()  # at the rows
    assert blank.shape[1] < written.shape[1]
    assert matrix(np.eye(90), list(map(str, range(90)))).shape[0] < 800


def test_a_small_picture_is_large_enough_for_its_caption() -> None:
    tiles = torch.zeros(3, 3, 8, 8, dtype=torch.uint8)
    bare, told = sheet(tiles), sheet(tiles, ["aeroplane 100%\nis automobile", "cat 50%", "dog"])
    assert bare.shape == (4 + 96 + 4, 3 * 100 + 4, 3)
    assert told.shape[0] == bare.shape[0] + 2 * 18
    assert told.shape[1] > bare.shape[1]
    letters = (told[4 + 96 :] < 128).all(2)
    width = told.shape[1] // 3
    assert [bool(letters[:, n * width : (n + 1) * width].any()) for n in range(3)] == [True] * 3


@pytest.mark.parametrize(
    ("tag", "kind", "stop", "steps"),
    [
        pytest.param("samples/val", ValidationSamples, 9, [3, 12, 18], id="validation"),
        pytest.param("samples/train", TrainingSamples, 10, [3, 12], id="waiting-for-a-log-line"),
    ],
)
def test_a_resumed_run_shows_what_it_would_have_shown(
    stop_at: Any, carry_over: Any, tag: str, kind: type[Callback], stop: int, steps: list[int]
) -> None:
    def run(*extra: Any) -> tuple[Gallery, Trainer]:
        gallery = Gallery()
        callbacks = {"gallery": gallery, "kind": kind(), **dict(extra)}
        return gallery, trainer_of(callbacks, max_epochs=6, log_every_n_steps=3)

    (whole, all_of_it), (first, begun), (second, rest) = run(), run(("stop", stop_at(stop))), run()
    for trainer in (all_of_it, begun):
        torch.manual_seed(5)  # of the dropout masks
        trainer.fit()
    carry_over(begun, rest)
    rest.fit()
    assert whole.steps(tag) == steps
    shown = first.shown[tag] + second.shown[tag]
    for (step, picture), (other, same) in zip(whole.shown[tag], shown, strict=True):
        assert step == other
        assert np.array_equal(picture, same)


def test_layers_against_plain_pytorch(make_trainer: Any) -> None:
    class Watches(Callback):
        def __init__(self) -> None:
            self.before: dict[str, Tensor] = {}
            self.logged: dict[int, dict[str, float]] = {}

        def on_gradients(self, trainer: Any) -> None:
            state = trainer.model.named_parameters()
            self.before = {name: p.detach().clone() for name, p in state}
            self.gradients = {n: p.grad.clone() for n, p in trainer.model.named_parameters()}

        def on_log(self, trainer: Any, scalars: Any) -> None:
            if "update_ratio/0" in scalars:
                after = dict(trainer.model.named_parameters())
                names = ("0.weight", "0.bias")

                def norm(tensors: dict[str, Tensor]) -> float:
                    return float(torch.cat([tensors[n].flatten() for n in names]).norm())

                change = {n: after[n].detach() - self.before[n] for n in names}
                ratio = norm(change) / norm(self.before)
                self.logged[trainer.state.global_step] = {
                    "found": scalars["update_ratio/0"] / ratio,
                    "gradient": scalars["grad_norm/0"] / norm(self.gradients),
                }

    watches = Watches()
    trainer = make_trainer({"layers": LayerStatistics(4), "watches": watches})
    trainer.fit()
    assert list(watches.logged) == [4, 8]
    for values in watches.logged.values():
        assert values == pytest.approx({"found": 1.0, "gradient": 1.0}, rel=1e-5)


def test_what_does_not_fit_the_task_shows_nothing(make_trainer: Any) -> None:
    gallery = Gallery()
    others = {"masks": Masks(), "made": GeneratedImages(), "text": GeneratedText()}
    tried = {k: v for k, v in everything().items() if k not in ("graph", "histograms", "texts")}
    make_trainer({"gallery": gallery, **tried, **others}).fit()  # regression on vectors
    assert gallery.shown == {}
