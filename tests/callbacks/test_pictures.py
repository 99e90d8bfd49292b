"""Pictures against counting by hand; at their intervals; and the training does not notice them."""

import json

import numpy as np
import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import Tensor, nn

import toys
from regimen.callbacks.histograms import Histograms
from regimen.callbacks.pictures.boxes import Boxes, with_boxes
from regimen.callbacks.pictures.classes import ConfusionMatrix, PRCurves
from regimen.callbacks.pictures.generated import GeneratedImages, GeneratedText
from regimen.callbacks.pictures.graph import Graph
from regimen.callbacks.pictures.layers import LayerStatistics
from regimen.callbacks.pictures.masks import Masks, overlay
from regimen.callbacks.pictures.picture import matrix, pixels, sheet
from regimen.callbacks.pictures.samples import Misclassified, TrainingSamples, ValidationSamples
from regimen.callbacks.pictures.texts import Texts
from regimen.callbacks.support import CallbackError, is_due
from regimen.callbacks.tensorboard import TensorBoard
from regimen.callbacks.trackers.recorder import MetricsLog
from regimen.models import gan
from regimen.trainer.callback import Callback
from regimen.trainer.evaluation import evaluate
from regimen.trainer.rng import RandomStates
from regimen.trainer.tasks.classification import Classification
from regimen.trainer.tasks.detection import Detection
from regimen.trainer.tasks.gan import GAN
from regimen.trainer.tasks.language_model import LanguageModel
from regimen.trainer.tasks.multilabel import MultiLabel
from regimen.trainer.tasks.segmentation import Segmentation
from same_run import logged
from toys import StopAt

CLASSES = 3


class Gallery(Callback):
    """Keep what is shown: name to (step, value) pairs."""

    def __init__(self):
        self.shown = {}

    def on_media(self, trainer, name, media):
        self.shown.setdefault(name, []).append((trainer.log_point.step, media))

    def steps(self, name):
        return [step for step, _ in self.shown[name]]


def images(count, seed):
    generator = torch.Generator().manual_seed(seed)
    pixels = torch.randn(count, 6, 1, 8, 8, generator=generator, dtype=torch.float64)
    labels = torch.randint(CLASSES, (count, 6), generator=generator)
    return list(zip(pixels, labels, strict=True))


def network():
    body = nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Dropout(0.3)
    return nn.Sequential(*body, nn.Flatten(), nn.Linear(144, CLASSES))


def trainer_of(callbacks, run_dir=None, task=None, train=None, **options):
    torch.manual_seed(1)
    given = {"model": network(), "val": train or images(2, 1), "max_epochs": 4, **options}
    given = {"callbacks": callbacks, "log_every_n_steps": 2, **given}
    trainer = toys.trainer_of(task or Classification(CLASSES), train or images(3, 0), **given)
    trainer.use_run_dir(run_dir)
    return trainer


def everything():
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


def test_no_bit_of_the_training_changes(tmp_path):
    runs = {}
    for name, callbacks in (("bare", {}), ("shown", everything())):
        (tmp_path / name).mkdir()
        board = {"log": MetricsLog(), "board": TensorBoard()}
        run = trainer_of({**board, **callbacks}, tmp_path / name)
        run.fit()
        runs[name] = run, RandomStates([], int).state_dict()
    states = [{"rng": rng, **run.model.state_dict()} for run, rng in runs.values()]
    first, second = (json.dumps(state, default=Tensor.tolist) for state in states)
    assert first == second
    bare, shown = (logged(tmp_path / name) for name in runs)
    own = ("grad_norm/", "update_ratio/")
    assert bare == [{k: v for k, v in row.items() if not k.startswith(own)} for row in shown]


def test_each_is_shown_at_its_own_interval_and_by_default_ever_less_often():
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


def test_names_and_numbers_are_written_at_their_places_and_captions_fit():
    names = ["cat", "dog", "a very long name"]
    blank, written = (matrix(np.eye(3) * 7, n) for n in (["", "", ""], names))
    dark, edge = (written < 90).all(2), len(written) // 4  # a cell is as wide as the longest name
    for place in (dark[:edge, edge:], dark[edge:, :edge]):  # above the columns, at the rows
        assert all(part.any() for part in np.array_split(place, 3, axis=place.shape[1] > edge))
    assert blank.shape[1] < written.shape[1]
    tiles = torch.zeros(3, 3, 8, 8, dtype=torch.uint8)
    bare, told = sheet(tiles), sheet(tiles, ["aeroplane 100%\nis automobile", "cat 50%", "dog"])
    assert bare.shape == (4 + 96 + 4, 3 * 100 + 4, 3)
    assert told.shape[0] > bare.shape[0] + 2 * 10
    letters = (told[4 + 96 :] < 128).all(2).any(0)
    assert all(part.any() for part in np.array_split(letters, 3))


@pytest.mark.parametrize(
    ("tag", "kind", "stop", "steps"),
    [
        pytest.param("samples/val", ValidationSamples, 9, [3, 12, 18], id="validation"),
        pytest.param("samples/train", TrainingSamples, 10, [3, 12], id="waiting-for-a-log-line"),
    ],
)
def test_a_resumed_run_shows_what_it_would_have_shown(carry_over, tag, kind, stop, steps):
    def run(*extra):
        gallery = Gallery()
        callbacks = {"gallery": gallery, "kind": kind(), **dict(extra)}
        return gallery, trainer_of(callbacks, max_epochs=6, log_every_n_steps=3)

    (whole, all_of_it), (first, begun), (second, rest) = run(), run(("stop", StopAt(stop))), run()
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


class StopOnce(Callback):
    """End the run in the middle of its first validation, as a signal would."""

    def __init__(self):
        self.stopped = False

    def on_validation_batch(self, trainer, batch, output):
        if not self.stopped:
            self.stopped = True
            trainer.state.request_stop("SIGTERM", 143)


@pytest.mark.parametrize("kind", [ConfusionMatrix, PRCurves])
def test_a_validation_that_is_repeated_counts_each_sample_once(kind):
    shown = []
    for stops in ({}, {"stop": StopOnce()}):
        gallery = Gallery()
        run = trainer_of({"gallery": gallery, "picture": kind(), **stops}, max_epochs=2)
        torch.manual_seed(5)  # of the dropout masks
        run.fit()
        if stops:
            assert gallery.shown == {}
            run.fit()
        shown.append(gallery.shown)
    whole, repeated = shown
    assert whole.keys() == repeated.keys() != set()
    for name in whole:
        for (step, expected), (again, found) in zip(whole[name], repeated[name], strict=True):
            assert step == again
            assert all(map(np.array_equal, found, expected))


def test_layers_against_plain_pytorch(make_trainer):
    found = {}

    class Watches(Callback):
        """What the layer's parameters were in front of the step, and are behind it."""

        def on_gradients(self, trainer):
            layer = list(trainer.model[0].parameters())
            self.before = torch.cat([p.detach().flatten() for p in layer])
            self.gradients = torch.cat([p.grad.flatten() for p in layer])

        def on_log(self, trainer, scalars):
            if "update_ratio/0" in scalars:
                now = torch.cat([p.detach().flatten() for p in trainer.model[0].parameters()])
                ratio = (now - self.before).norm() / self.before.norm()
                shares = (
                    scalars["update_ratio/0"] / ratio,
                    scalars["grad_norm/0"] / self.gradients.norm(),
                )
                found[trainer.state.global_step] = [float(share) for share in shares]

    make_trainer({"layers": LayerStatistics(4), "watches": Watches()}).fit()
    assert found == {step: pytest.approx([1.0, 1.0], rel=1e-5) for step in (4, 8)}


def test_what_does_not_fit_the_task_shows_nothing(make_trainer):
    gallery = Gallery()
    others = {"masks": Masks(), "made": GeneratedImages(), "text": GeneratedText()}
    tried = {k: v for k, v in everything().items() if k not in ("graph", "histograms", "texts")}
    make_trainer({"gallery": gallery, **tried, **others}).fit()  # regression on vectors
    assert gallery.shown == {}


@pytest.mark.parametrize("kind", ["classes", "labels", "ignored"])
def test_counts_curves_and_the_most_surely_wrong_are_those_of_counting(kind, monkeypatch):
    drawn = []
    seen = []
    plain, gallery, val, train = pixels, Gallery(), images(3, 1), images(3, 0)
    monkeypatch.setattr(
        "regimen.callbacks.pictures.classes.matrix",
        lambda values, names, text="": drawn.append(values) or np.zeros((1, 1, 3), np.uint8),
    )
    monkeypatch.setattr(
        "regimen.callbacks.pictures.picture.pixels",
        lambda images: seen.append(images) or plain(images),
    )
    task = Classification(CLASSES)
    if kind == "labels":
        task = MultiLabel()
        train, val = (
            [(x, torch.nn.functional.one_hot(y, CLASSES).double()) for x, y in part]
            for part in (train, val)
        )
    elif kind == "ignored":
        task = Classification(CLASSES, torch.nn.CrossEntropyLoss(ignore_index=1))
    else:
        val[0][1][0] = -100  # a sample without a label
    callbacks = {"g": gallery, "curves": PRCurves(thresholds=5), "counts": ConfusionMatrix()}
    callbacks["wrong"] = Misclassified(count=4)
    run = trainer_of(callbacks, task=task, train=train, val=val, max_epochs=2)
    run.fit()
    run.model.eval()
    with torch.no_grad():
        scores = task.interpret(torch.cat([run.model(x) for x, _ in val]))
    labels = torch.cat([y for _, y in val])
    positive = labels > 0.5 if kind == "labels" else labels[:, None] == torch.arange(CLASSES)
    known = torch.ones(18, dtype=torch.bool)
    if kind != "labels":
        known = (labels >= 0) & ((labels != 1) | (kind != "ignored"))
    for index in range(CLASSES):
        curve = gallery.shown[f"pr_curve/{index}"][-1][1]
        for place, threshold in enumerate([0.0, 0.25, 0.5, 0.75, 1.0]):
            said, truth = scores[known, index] >= threshold, positive[known, index]
            counts = [(said & truth), (said & ~truth), (~said & ~truth), (~said & truth)]
            assert [part[place] for part in curve[1:]] == [count.sum() for count in counts]
    if kind != "labels":
        sure, predicted = scores.max(1)
        expected = np.zeros((CLASSES, CLASSES))
        np.add.at(expected, (labels[known], predicted[known]), 1)
        assert np.array_equal(drawn[-2], expected)
        assert expected.sum() == (17 if kind == "classes" else (labels != 1).sum())
        assert np.allclose(drawn[-1].sum(1)[expected.sum(1) > 0], 1)
        order = sure.argsort(descending=True).tolist()
        wrong = [i for i in order if known[i] and predicted[i] != labels[i]]
        assert len(wrong) > 4
        assert torch.equal(seen[-1], torch.cat([x for x, _ in val])[wrong[:4]])


@pytest.mark.parametrize("kind", [ConfusionMatrix, PRCurves, Misclassified])
def test_several_processes_are_shown_together(kind):
    val = images(2, 1)

    def shown(batches, others=()):
        gallery, picture, gathered = Gallery(), kind(), []
        run = trainer_of({"gallery": gallery, "picture": picture})
        run.group.gather = lambda own: gathered.append(own) or [own, *others]
        picture.on_validation_start(run)
        with torch.no_grad():
            for x, y in batches:
                picture.on_validation_batch(run, (x, y), run.model.eval()(x))
        picture.on_validation_end(run, {})
        return gathered, gallery

    (_, together), (_, whole) = shown(val[:1], shown(val[1:])[0]), shown(val)
    assert together.shown.keys() == whole.shown.keys() != set()
    for name in whole.shown:
        (_, ours), (_, expected) = together.shown[name][0], whole.shown[name][0]
        assert all(map(np.array_equal, ours, expected))


def test_masks_lie_over_their_images():
    generator = torch.Generator().manual_seed(0)
    batches = [
        (torch.rand(4, 1, 8, 8, generator=generator), torch.randint(3, (4, 8, 8))) for _ in range(2)
    ]
    gallery, model = Gallery(), nn.Conv2d(1, 3, 1)
    callbacks = {"g": gallery, "m": Masks(count=2)}
    trainer_of(callbacks, task=Segmentation(3), model=model, train=batches, max_epochs=1).fit()
    height, width, _ = gallery.shown["masks/val"][0][1].shape
    assert width == 3 * (96 + 4) + 4  # image, label and prediction of a sample in a row
    assert height > 2 * 96
    grey = torch.full((3, 2, 2), 50, dtype=torch.uint8)
    painted = overlay(grey, torch.tensor([[0, 1], [2, 255]]), 3)
    assert torch.equal(painted[:, 0, 0], grey[:, 0, 0])  # the background stays as it is
    assert len({tuple(pixel) for pixel in painted.flatten(1).T.tolist()}) == 4


class Detected(nn.Module):
    """A detector that knows one box for each image, and in the second of them another one."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))

    def forward(self, images, targets=None):
        if targets is not None:
            return {"loss": self.weight.sum()}
        boxes = torch.tensor([[4.0, 4, 12, 12], [20, 20, 30, 30]])
        labels = torch.tensor([1, 0])
        answers = []
        for index in range(len(images)):
            scores = torch.tensor([0.9, 0.2 + 0.6 * (index == 1)])
            answers.append({"boxes": boxes, "scores": scores, "labels": labels})
        return answers


def test_boxes_are_shown_beside_the_true_ones():
    pytest.importorskip("faster_coco_eval")
    truths = [
        {"boxes": torch.zeros(0, 4), "labels": torch.zeros(0, dtype=torch.long)},
        {"boxes": torch.tensor([[4.0, 4, 12, 12]]), "labels": torch.tensor([1])},
    ]
    batches = [(torch.rand(2, 3, 32, 32), truths)]
    gallery, boxes = Gallery(), Boxes(count=2)
    callbacks = {"g": gallery, "b": boxes}
    task = Detection(2)
    trainer_of(callbacks, task=task, model=Detected(), train=batches, max_epochs=1).fit()
    height, width, _ = gallery.shown["boxes/val"][0][1].shape
    assert width == 2 * (256 + 4) + 4  # truth and answer of an image in a row
    assert height > 2 * 256
    black = torch.zeros(1, 32, 32, dtype=torch.uint8)
    drawn = with_boxes(black, torch.tensor([[4.0, 4, 12, 12]]), ["one"], [1])
    inked = drawn.amax(0).nonzero()
    assert drawn.shape == (3, 256, 256)
    assert inked.amin(0).tolist() == pytest.approx([32, 32], abs=2)  # enlarged by 8
    assert inked.amax(0).tolist() == pytest.approx([96, 96], abs=2)
    assert not with_boxes(black, torch.zeros(0, 4), [], []).any()


def test_generated_images_come_from_the_same_noise_each_time():
    noise = torch.randn(2, 5, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    gallery, made, batch = Gallery(), GeneratedImages(), (torch.rand(2, 1, 4, 4), noise)
    callbacks = {"g": gallery, "made": made}
    run = trainer_of(callbacks, task=GAN(), model=gan.GAN(1, 4, latent_dim=5), train=[batch])
    made.on_validation_start(run)
    evaluate(run.components, run.val_loaders["val"], "val", hooks=run.hooks, shows_batches=True)
    made.on_validation_end(run, {})
    expected = sheet(pixels(run.model(noise, part="generator")), columns=8)
    assert np.array_equal(gallery.shown["generated/val"][0][1], expected)


@pytest.mark.parametrize(
    ("target", "shown"),
    [
        pytest.param(torch.zeros(2, 4, 4, dtype=torch.long), False, id="masks"),
        pytest.param(torch.zeros(2, 1, 4, 4, dtype=torch.uint8), False, id="masks of one channel"),
        pytest.param(torch.zeros(2, 3, 4, 4), True, id="pictures"),
        pytest.param(torch.zeros(2, dtype=torch.long), True, id="labels"),
    ],
)
def test_logits_of_a_class_for_each_pixel_are_no_pictures(target, shown):
    made = GeneratedImages()
    made.collect(None, (torch.rand(2, 3, 4, 4), target), torch.rand(2, 3, 4, 4))
    assert bool(made.kept) is shown


def test_text_is_written_from_a_prompt_and_draws_nothing_from_the_training(tmp_path):
    tokens = torch.randint(4, (3, 9), generator=torch.Generator().manual_seed(0))
    batches = [(tokens[:, :-1], tokens[:, 1:])]
    (tmp_path / "inference.json").write_text(json.dumps({"classes": ["a", "b", "c", "d"]}))
    states, texts = [], []
    for length in (1, 30):
        gallery, text = Gallery(), GeneratedText(count=1, prompt=4, length=length)
        options = {"task": LanguageModel(4), "model": nn.Embedding(4, 4), "train": batches}
        trainer_of({"g": gallery, "text": text}, tmp_path, max_epochs=1, **options).fit()
        states.append(torch.get_rng_state())
        texts.append(gallery.shown["generated/text"][0][1])
    prompt = "".join("abcd"[i] for i in tokens[0, :4].tolist())
    assert [len(text) for text in texts] == [4 + 4 + 1, 4 + 4 + 30]
    assert all(text.startswith(f"    {prompt}") for text in texts)
    assert torch.equal(*states)


def test_texts_of_a_run_are_logged_once(tmp_path):
    (tmp_path / "config.yaml").write_text("seed: 3\n")
    (tmp_path / "overrides.yaml").write_text("- seed=3\n")
    gallery = Gallery()
    trainer_of({"texts": Texts(), "g": gallery}, tmp_path, max_epochs=2).fit()
    texts = {name: shown for name, ((_, shown),) in gallery.shown.items()}
    assert texts["run/config"] == "    seed: 3"
    assert texts["run/overrides"] == "    - seed=3"


def test_a_graph_needs_tensorboard_and_a_model_that_can_be_traced(make_trainer, tmp_path, caplog):
    with pytest.raises(CallbackError, match=r"callbacks\.graph needs callbacks\.tensorboard"):
        make_trainer({"graph": Graph()}).fit()

    class Untraceable(nn.Linear):
        def forward(self, inputs):
            if torch.jit.is_tracing():
                raise RuntimeError("not this one")
            return super().forward(inputs)

    callbacks = {"tensorboard": TensorBoard(), "graph": Graph()}
    make_trainer(callbacks, tmp_path / "a", model=Untraceable(4, 2).double()).fit()
    (warning,) = (record.getMessage() for record in caplog.records)
    assert warning == "callbacks.graph: not this one; training continues without it"

    make_trainer({"tensorboard": TensorBoard(), "graph": Graph()}, tmp_path / "b").fit()
    board = EventAccumulator(str(tmp_path / "b" / "tensorboard"))
    assert any("Linear" in node.name for node in board.Reload().Graph().node)


def test_a_sample_without_a_label_is_shown_with_its_prediction_only():
    val = [
        (x, torch.full_like(y, -100).index_fill(0, torch.tensor([0]), 1)) for x, y in images(2, 1)
    ]
    gallery = Gallery()
    trainer_of({"gallery": gallery, "val": ValidationSamples()}, val=val, max_epochs=1).fit()
    assert gallery.steps("samples/val") == [3]
