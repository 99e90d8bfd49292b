"""What the pictures show is what happened, and the training does not notice them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from callbacks.histograms import Histograms
from callbacks.metrics_log import MetricsLog
from callbacks.pictures.classes import ConfusionMatrix, PRCurves
from callbacks.pictures.generated import GeneratedImages, GeneratedText
from callbacks.pictures.graph import Graph
from callbacks.pictures.layers import LayerStatistics
from callbacks.pictures.masks import Masks
from callbacks.pictures.samples import Misclassified, TrainingSamples, ValidationSamples
from callbacks.pictures.texts import Texts
from callbacks.support import drawing
from callbacks.support.errors import CallbackError
from callbacks.support.watching import is_due
from callbacks.tensorboard import TensorBoard
from trainer import rng
from trainer.callback import Callback
from trainer.media import PRCurve, as_image
from trainer.optimizers.optimizers import Optimizers
from trainer.options import TrainerOptions
from trainer.strategies.strategy import Strategy
from trainer.task import Task
from trainer.tasks.classification import Classification
from trainer.tasks.gan import GAN
from trainer.tasks.language_model import LanguageModel
from trainer.tasks.multilabel import MultiLabel
from trainer.tasks.segmentation import Segmentation
from trainer.trainer import Trainer

CLASSES = 3


class Gallery(Callback):
    """Keep what is shown: name to (step, value) pairs."""

    def __init__(self) -> None:
        self.shown: dict[str, list[tuple[int, Any]]] = {}

    def _keep(self, trainer: Any, name: str, value: Any) -> None:
        self.shown.setdefault(name, []).append((trainer.log_point.step, value))

    on_image = on_text = on_histogram = on_pr_curve = _keep

    def steps(self, name: str) -> list[int]:
        return [step for step, _ in self.shown[name]]


def images(count: int, seed: int) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    pixels = torch.randn(count, 6, 1, 8, 8, generator=generator)
    labels = torch.randint(CLASSES, (count, 6), generator=generator)
    return list(zip(pixels, labels, strict=True))


def network() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 4, 3),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.Dropout(0.3),
        nn.Flatten(),
        nn.Linear(144, CLASSES),
    )


def trainer_of(
    callbacks: Mapping[str, Callback],
    run_dir: Path | None = None,
    *,
    task: Task | None = None,
    model: nn.Module | None = None,
    train: Any = None,
    val: Any = None,
    optimizer: Any = None,
    **options: Any,
) -> Trainer:
    torch.manual_seed(1)
    model = model or network()
    return Trainer(
        model,
        task or Classification(CLASSES),
        optimizer(model) if optimizer else torch.optim.SGD(model.parameters(), 0.1, momentum=0.9),
        train or images(3, 0),
        val or images(2, 1),
        strategy=Strategy("cpu"),
        callbacks=callbacks,
        options=TrainerOptions(**{"max_epochs": 4, "log_every_n_steps": 2, **options}),
        run_dir=run_dir,
    )


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
    assert gallery.steps("samples/val") == [3, 6, 12, 21]  # the 1st, 2nd, 4th and the last
    assert gallery.steps("confusion/counts") == [6, 12, 18]
    assert [n for n in range(1, 20) if is_due(n, None)] == [1, 2, 4, 8, 16]


def test_a_resumed_run_shows_what_it_would_have_shown(stop_at: Any, carry_over: Any) -> None:
    def run(*extra: Any) -> tuple[Gallery, Trainer]:
        gallery = Gallery()
        callbacks = {"gallery": gallery, "val": ValidationSamples(), **dict(extra)}
        return gallery, trainer_of(callbacks, max_epochs=6)

    (whole, all_of_it), (first, begun), (second, rest) = run(), run(("stop", stop_at(9))), run()
    for trainer in (all_of_it, begun):
        torch.manual_seed(5)  # of the dropout masks
        trainer.fit()
    carry_over(begun, rest)
    rest.fit()
    assert whole.steps("samples/val") == [3, 6, 12, 18]
    shown = first.shown["samples/val"] + second.shown["samples/val"]
    for (step, picture), (other, same) in zip(whole.shown["samples/val"], shown, strict=True):
        assert step == other
        assert np.array_equal(picture, same)


def answers(trainer: Trainer, val: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Return probabilities and labels, in plain PyTorch."""
    trainer.model.eval()
    with torch.no_grad():
        logits = torch.cat([trainer.model(x) for x, _ in val])
    return logits.softmax(1), torch.cat([y for _, y in val])


def test_the_confusion_matrix_counts_every_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[np.ndarray[Any, Any]] = []
    monkeypatch.setattr(
        "callbacks.pictures.classes.matrix",
        lambda values, names, text="": drawn.append(values) or np.zeros((1, 1, 3), np.uint8),
    )
    val = images(2, 1)
    val[0][1][0] = -100  # a sample without a label
    run = trainer_of({"g": Gallery(), "c": ConfusionMatrix()}, val=val)
    run.fit()
    probabilities, labels = answers(run, val)
    expected = np.zeros((CLASSES, CLASSES))
    for label, answer in zip(labels.tolist(), probabilities.argmax(1).tolist(), strict=True):
        if label >= 0:
            expected[label, answer] += 1
    assert np.array_equal(drawn[-2], expected)
    assert expected.sum() == 11
    assert np.allclose(drawn[-1].sum(1)[expected.sum(1) > 0], 1)


@pytest.mark.parametrize("kind", ["classes", "labels"])
def test_pr_curves_are_those_of_counting(kind: str) -> None:
    gallery, val, train = Gallery(), images(2, 1), images(3, 0)
    task: Task = Classification(CLASSES)
    if kind == "labels":
        task = MultiLabel()
        train, val = (
            [(x, torch.nn.functional.one_hot(y, CLASSES).float()) for x, y in part]
            for part in (train, val)
        )
    run = trainer_of({"g": gallery, "c": PRCurves(thresholds=5)}, task=task, train=train, val=val)
    run.fit()
    _, labels = answers(run, val)
    scores = task.interpret(torch.cat([run.model(x) for x, _ in val])).detach()
    positive = labels > 0.5 if kind == "labels" else labels[:, None] == torch.arange(CLASSES)
    for index in range(CLASSES):
        curve: PRCurve = gallery.shown[f"pr_curve/{index}"][-1][1]
        for place, threshold in enumerate([0.0, 0.25, 0.5, 0.75, 1.0]):
            said, truth = scores[:, index] >= threshold, positive[:, index]
            assert curve.true_positives[place] == (said & truth).sum()
            assert curve.false_positives[place] == (said & ~truth).sum()
            assert curve.true_negatives[place] == (~said & ~truth).sum()
            assert curve.false_negatives[place] == (~said & truth).sum()


def test_the_misclassified_are_the_most_surely_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Tensor] = []
    plain = drawing.pixels
    monkeypatch.setattr(
        "callbacks.pictures.samples.pixels", lambda images: seen.append(images) or plain(images)
    )
    val = images(3, 1)
    run = trainer_of({"g": Gallery(), "w": Misclassified(count=4)}, val=val, max_epochs=2)
    run.fit()
    probabilities, labels = answers(run, val)
    sure, predicted = probabilities.max(1)
    wrong = [i for i in sure.argsort(descending=True).tolist() if predicted[i] != labels[i]]
    assert len(wrong) > 4
    assert torch.equal(seen[-1], torch.cat([x for x, _ in val])[wrong[:4]])


def test_several_processes_count_together() -> None:
    val = images(2, 1)

    def counted(batches: Any, reduced: Any = None) -> Tensor:
        callback = ConfusionMatrix()
        run = trainer_of({"g": Gallery(), "c": callback}, val=batches, max_epochs=1)
        totals: list[Tensor] = []

        def reduce(tensor: Tensor) -> Tensor:
            if tensor.numel() == CLASSES**2:  # of the matrix
                totals.append(tensor if reduced is None else tensor + reduced)
                return totals[-1]
            return tensor

        run.group.reduce = reduce  # type: ignore[method-assign]
        run.fit()
        return totals[-1]

    halves = counted(val[1:])
    assert torch.equal(counted(val[:1], reduced=halves), counted(val))


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
    assert gallery.shown["masks/val"][0][1].shape == (82 + 4, 6 * 68 + 4, 3)
    grey = as_image(torch.full((2, 2), 0.2))
    painted = drawing.overlay(grey, torch.tensor([[0, 1], [2, 255]]), 3)
    assert np.array_equal(painted[0, 0], grey[0, 0])  # the background stays as it is
    assert len({tuple(pixel) for pixel in painted.reshape(-1, 3).tolist()}) == 4


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
    expected = drawing.sheet(drawing.pixels(run.model(noise, part="generator")))
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


def test_what_does_not_fit_the_task_shows_nothing(make_trainer: Any) -> None:
    gallery = Gallery()
    others = {"masks": Masks(), "made": GeneratedImages(), "text": GeneratedText()}
    tried = {k: v for k, v in everything().items() if k not in ("graph", "histograms", "texts")}
    make_trainer({"gallery": gallery, **tried, **others}).fit()  # regression on vectors
    assert gallery.shown == {}


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


@pytest.mark.parametrize(
    "build",
    [
        pytest.param(lambda: TrainingSamples(count=0), id="no images"),
        pytest.param(lambda: Misclassified(every_n_validations=0), id="interval"),
        pytest.param(lambda: LayerStatistics(0), id="steps"),
        pytest.param(lambda: PRCurves(thresholds=1), id="thresholds"),
        pytest.param(lambda: GeneratedText(temperature=0), id="temperature"),
        pytest.param(lambda: Masks(count=0), id="masks"),
    ],
)
def test_options_out_of_range(build: Any) -> None:
    with pytest.raises(CallbackError):
        build()
