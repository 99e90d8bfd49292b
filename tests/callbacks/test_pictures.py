"""Pictures against counting by hand; at their intervals; and the training does not notice them."""

import json
from typing import NamedTuple

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


def is_dark(picture):
    """Say for each pixel of [height, width, 3] whether something is written there."""
    return (picture < 128).all(2)


def network():
    return nn.Sequential(
        nn.Conv2d(1, 4, 3),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.Dropout(0.3),
        nn.Flatten(),
        nn.Linear(144, CLASSES),
    )


def trainer_of(callbacks, run_dir=None, task=None, train=None, **options):
    torch.manual_seed(1)
    given = {
        "callbacks": callbacks,
        "model": network(),
        "val": train or images(2, 1),
        "max_epochs": 4,
        "log_every_n_steps": 2,
    }
    task = task or Classification(CLASSES)
    train = train or images(3, 0)
    trainer = toys.trainer_of(task, train, **given | options)
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


def state_after_a_run(callbacks, folder):
    """Train, and return weights and generators as text, and the lines of the log."""
    folder.mkdir()
    recorders = {"log": MetricsLog(), "board": TensorBoard()}
    trainer = trainer_of(recorders | callbacks, folder)
    trainer.fit()
    generators = RandomStates([], int).state_dict()
    state = {"rng": generators, **trainer.model.state_dict()}
    return json.dumps(state, default=Tensor.tolist), logged(folder)


def without_layers(row):
    """Leave out what the statistics of layers log."""
    own = ("grad_norm/", "update_ratio/")
    return {name: value for name, value in row.items() if not name.startswith(own)}


def test_no_bit_of_the_training_changes(tmp_path):
    bare_state, bare_lines = state_after_a_run({}, tmp_path / "bare")
    state, lines = state_after_a_run(everything(), tmp_path / "shown")
    assert state == bare_state
    assert [without_layers(row) for row in lines] == bare_lines


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


def test_names_and_numbers_are_written_at_their_places():
    names = ["cat", "dog", "a very long name"]
    blank = matrix(np.eye(3) * 7, ["", "", ""])
    written = matrix(np.eye(3) * 7, names)

    assert blank.shape[1] < written.shape[1]

    dark = (written < 90).all(2)
    edge = len(written) // 4  # a cell is as wide as the longest name
    above_the_columns = dark[:edge, edge:]

    for name in np.array_split(above_the_columns, 3, axis=1):
        assert name.any()

    at_the_rows = dark[edge:, :edge]
    for name in np.array_split(at_the_rows, 3, axis=0):
        assert name.any()


def test_captions_fit_below_their_tiles():
    tiles = torch.zeros(3, 3, 8, 8, dtype=torch.uint8)
    bare = sheet(tiles)
    told = sheet(tiles, ["aeroplane 100%\nis automobile", "cat 50%", "dog"])

    assert bare.shape == (4 + 96 + 4, 3 * 100 + 4, 3)
    assert told.shape[0] > bare.shape[0] + 2 * 10  # two lines

    captions = told[4 + 96 :]
    columns_with_ink = is_dark(captions).any(0)
    for below_a_tile in np.array_split(columns_with_ink, 3):
        assert below_a_tile.any()


@pytest.mark.parametrize(
    ("tag", "kind", "stop", "steps"),
    [
        pytest.param("samples/val", ValidationSamples, 9, [3, 12, 18], id="validation"),
        pytest.param("samples/train", TrainingSamples, 10, [3, 12], id="waiting-for-a-log-line"),
    ],
)
def test_a_resumed_run_shows_what_it_would_have_shown(carry_over, tag, kind, stop, steps):
    def run(**more):
        gallery = Gallery()
        callbacks = {
            "gallery": gallery,
            "kind": kind(),
            **more,
        }
        return gallery, trainer_of(callbacks, max_epochs=6, log_every_n_steps=3)

    whole, uninterrupted = run()
    first, begun = run(stop=StopAt(stop))
    second, resumed = run()
    for trainer in (uninterrupted, begun):
        torch.manual_seed(5)  # of the dropout masks
        trainer.fit()
    carry_over(begun, resumed)
    resumed.fit()

    assert whole.steps(tag) == steps

    shown = first.shown[tag] + second.shown[tag]
    for (step, picture), (other_step, other) in zip(whole.shown[tag], shown, strict=True):
        assert step == other_step
        assert np.array_equal(picture, other)


def flat(tensors):
    return torch.cat([tensor.detach().flatten() for tensor in tensors])


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
    found = []

    class Watches(Callback):
        """What the layer's parameters were in front of the step, and are behind it."""

        def on_gradients(self, trainer):
            layer = list(trainer.model[0].parameters())
            self.before = flat(layer)
            self.gradients = flat(p.grad for p in layer)

        def on_log(self, trainer, scalars):
            if "update_ratio/0" not in scalars:
                return
            change = flat(trainer.model[0].parameters()) - self.before
            expected = {
                "update_ratio/0": float(change.norm() / self.before.norm()),
                "grad_norm/0": float(self.gradients.norm()),
            }
            logged = {name: scalars[name] for name in expected}
            assert logged == pytest.approx(expected, rel=1e-5)
            found.append(trainer.state.global_step)

    make_trainer({"layers": LayerStatistics(4), "watches": Watches()}).fit()
    assert found == [4, 8]


def test_what_does_not_fit_the_task_shows_nothing(make_trainer):
    gallery = Gallery()
    callbacks = everything()
    for name in ("graph", "histograms", "texts"):  # these fit any task
        del callbacks[name]
    callbacks["masks"] = Masks()
    callbacks["made"] = GeneratedImages()
    callbacks["text"] = GeneratedText()

    make_trainer({"gallery": gallery, **callbacks}).fit()  # regression on vectors

    assert gallery.shown == {}


class Answers(NamedTuple):
    """What a model says of the validation samples, and which of them count."""

    scores: Tensor  # [samples, classes]
    labels: Tensor  # [samples], or [samples, classes] of several labels
    positive: Tensor  # [samples, classes]: whether the class is true
    known: Tensor  # [samples]


def check_curves(gallery, answers):
    """Compare each point of each curve with counting."""
    for index in range(CLASSES):
        _, curve = gallery.shown[f"pr_curve/{index}"][-1]
        scores = answers.scores[answers.known, index]
        truth = answers.positive[answers.known, index]
        for place, threshold in enumerate([0.0, 0.25, 0.5, 0.75, 1.0]):
            said = scores >= threshold
            found = [part[place] for part in curve[1:]]
            assert found == [
                (said & truth).sum(),
                (said & ~truth).sum(),
                (~said & ~truth).sum(),
                (~said & truth).sum(),
            ]


def check_matrices(counts, shares, answers):
    """Compare the confusion matrix with counting."""
    labels = answers.labels[answers.known]
    predicted = answers.scores.argmax(1)[answers.known]
    expected = np.zeros((CLASSES, CLASSES))
    np.add.at(expected, (labels, predicted), 1)
    assert np.array_equal(counts, expected)
    rows_in_use = expected.sum(1) > 0
    assert np.allclose(shares.sum(1)[rows_in_use], 1)


def check_misclassified(shown, inputs, answers):
    """Check that the four wrong samples with the highest scores are shown, in order."""
    sure, predicted = answers.scores.max(1)
    is_wrong = answers.known & (predicted != answers.labels)
    order = sure.argsort(descending=True)
    wrong = order[is_wrong[order]]
    assert len(wrong) > 4
    assert torch.equal(shown, inputs[wrong[:4]])


@pytest.fixture
def drawn(monkeypatch):
    """Return the matrices and the images that are drawn, in two lists."""
    matrices = []
    pictures = []

    def draw_matrix(values, names, text=""):
        matrices.append(values)
        return np.zeros((1, 1, 3), np.uint8)

    def draw_pixels(images):
        pictures.append(images)
        return pixels(images)

    monkeypatch.setattr("regimen.callbacks.pictures.classes.matrix", draw_matrix)
    monkeypatch.setattr("regimen.callbacks.pictures.picture.pixels", draw_pixels)
    return matrices, pictures


def answers_of(trainer, val, known=None):
    trainer.model.eval()
    with torch.no_grad():
        outputs = torch.cat([trainer.model(x) for x, _ in val])
    scores = trainer.task.interpret(outputs)
    labels = torch.cat([y for _, y in val])
    if labels.ndim == 2:
        positive = labels > 0.5
    else:
        positive = labels[:, None] == torch.arange(CLASSES)
    counts = torch.ones(len(labels), dtype=torch.bool)
    if known is not None:
        counts = known(labels)
    return Answers(scores, labels, positive, counts)


def shown_of_classes(task, train, val):
    """Train with all pictures of classes, and return what they showed, and the trainer."""
    gallery = Gallery()
    callbacks = {
        "gallery": gallery,
        "curves": PRCurves(thresholds=5),
        "counts": ConfusionMatrix(),
        "wrong": Misclassified(count=4),
    }
    trainer = trainer_of(callbacks, task=task, train=train, val=val, max_epochs=2)
    trainer.fit()
    return gallery, trainer


@pytest.mark.parametrize(
    "ignored",
    [
        pytest.param(-100, id="a sample without a label"),
        pytest.param(1, id="a class that does not count"),
    ],
)
def test_counts_curves_and_the_most_surely_wrong_are_those_of_counting(ignored, drawn):
    matrices, pictures = drawn
    train = images(3, 0)
    val = images(3, 1)
    if ignored == -100:
        _, labels = val[0]
        labels[0] = ignored
    loss = torch.nn.CrossEntropyLoss(ignore_index=ignored)

    gallery, trainer = shown_of_classes(Classification(CLASSES, loss), train, val)

    answers = answers_of(trainer, val, known=lambda labels: labels != ignored)
    inputs = torch.cat([x for x, _ in val])
    check_curves(gallery, answers)
    check_matrices(matrices[-2], matrices[-1], answers)
    check_misclassified(pictures[-1], inputs, answers)


def one_hot(batches):
    return [(x, torch.nn.functional.one_hot(y, CLASSES).double()) for x, y in batches]


def test_curves_of_several_labels_are_those_of_counting(drawn):
    train = one_hot(images(3, 0))
    val = one_hot(images(3, 1))

    gallery, trainer = shown_of_classes(MultiLabel(), train, val)

    check_curves(gallery, answers_of(trainer, val))


@pytest.mark.parametrize("kind", [ConfusionMatrix, PRCurves, Misclassified])
def test_several_processes_are_shown_together(kind):
    first, second = images(2, 1)

    def shown(batches, of_others=()):
        """Return what one process shows, and what it gives to the others."""
        gallery = Gallery()
        picture = kind()
        gathered = []

        def gather(own):
            gathered.append(own)
            return [own, *of_others]

        trainer = trainer_of({"gallery": gallery, "picture": picture})
        trainer.group.gather = gather
        picture.on_validation_start(trainer)
        trainer.model.eval()
        with torch.no_grad():
            for x, y in batches:
                picture.on_validation_batch(trainer, (x, y), trainer.model(x))
        picture.on_validation_end(trainer, {})
        return gallery.shown, gathered

    _, of_second = shown([second])
    together, _ = shown([first], of_second)
    whole, _ = shown([first, second])

    assert whole
    assert together.keys() == whole.keys()
    for name in whole:
        _, ours = together[name][0]
        _, expected = whole[name][0]
        for part, expected_part in zip(ours, expected, strict=True):
            assert np.array_equal(part, expected_part)


def test_masks_are_shown_beside_image_and_label():
    generator = torch.Generator().manual_seed(0)
    batches = []
    for _ in range(2):
        pictures = torch.rand(4, 1, 8, 8, generator=generator)
        masks = torch.randint(3, (4, 8, 8), generator=generator)
        batches.append((pictures, masks))
    gallery = Gallery()
    callbacks = {"gallery": gallery, "masks": Masks(count=2)}
    model = nn.Conv2d(1, 3, 1)

    trainer_of(
        callbacks,
        task=Segmentation(3),
        model=model,
        train=batches,
        max_epochs=1,
    ).fit()

    _, picture = gallery.shown["masks/val"][0]
    height, width, _ = picture.shape

    assert width == 3 * (96 + 4) + 4  # image, label and prediction of a sample in a row
    assert height > 2 * 96


def test_masks_lie_over_their_images():
    grey = torch.full((3, 2, 2), 50, dtype=torch.uint8)
    mask = torch.tensor([[0, 1], [2, 255]])
    painted = overlay(grey, mask, 3)

    assert torch.equal(painted[:, 0, 0], grey[:, 0, 0])  # the background stays as it is

    colours = painted.flatten(1).unique(dim=1)
    assert colours.shape[1] == 4


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
            second = 0.8 if index == 1 else 0.2
            scores = torch.tensor([0.9, second])
            answers.append({"boxes": boxes, "scores": scores, "labels": labels})
        return answers


BOX = torch.tensor([[4.0, 4, 12, 12]])


def test_boxes_are_shown_beside_the_true_ones():
    pytest.importorskip("faster_coco_eval")
    nothing = {"boxes": torch.zeros(0, 4), "labels": torch.zeros(0, dtype=torch.long)}
    one_box = {"boxes": BOX, "labels": torch.tensor([1])}
    batches = [(torch.rand(2, 3, 32, 32), [nothing, one_box])]
    gallery = Gallery()
    callbacks = {"gallery": gallery, "boxes": Boxes(count=2)}
    task = Detection(2)

    trainer_of(
        callbacks,
        task=task,
        model=Detected(),
        train=batches,
        max_epochs=1,
    ).fit()

    _, picture = gallery.shown["boxes/val"][0]
    height, width, _ = picture.shape

    assert width == 2 * (256 + 4) + 4  # truth and answer of an image in a row
    assert height > 2 * 256


def test_boxes_are_drawn_at_their_places():
    black = torch.zeros(1, 32, 32, dtype=torch.uint8)
    drawn = with_boxes(black, BOX, ["one"], [1])
    inked = drawn.amax(0).nonzero()
    top_left = inked.amin(0).tolist()
    bottom_right = inked.amax(0).tolist()

    assert drawn.shape == (3, 256, 256)
    assert top_left == pytest.approx([32, 32], abs=2)  # enlarged by 8
    assert bottom_right == pytest.approx([96, 96], abs=2)


def test_without_boxes_nothing_is_drawn():
    black = torch.zeros(1, 32, 32, dtype=torch.uint8)
    drawn = with_boxes(black, torch.zeros(0, 4), [], [])
    assert not drawn.any()


def test_generated_images_come_from_the_same_noise_each_time():
    generator = torch.Generator().manual_seed(3)
    noise = torch.randn(2, 5, generator=generator, dtype=torch.float64)
    batch = (torch.rand(2, 1, 4, 4), noise)
    gallery = Gallery()
    made = GeneratedImages()
    callbacks = {"gallery": gallery, "made": made}
    model = gan.GAN(1, 4, latent_dim=5)
    trainer = trainer_of(callbacks, task=GAN(), model=model, train=[batch])
    val = trainer.val_loaders["val"]

    made.on_validation_start(trainer)
    evaluate(trainer.components, val, "val", hooks=trainer.hooks, shows_batches=True)
    made.on_validation_end(trainer, {})

    generated = trainer.model(noise, part="generator")
    expected = sheet(pixels(generated), columns=8)
    _, picture = gallery.shown["generated/val"][0]

    assert np.array_equal(picture, expected)


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
    inputs = torch.rand(2, 3, 4, 4)
    outputs = torch.rand(2, 3, 4, 4)
    made.collect(None, (inputs, target), outputs)

    assert bool(made.kept) is shown


def test_text_is_written_from_a_prompt_and_draws_nothing_from_the_training(tmp_path):
    classes = json.dumps({"classes": ["a", "b", "c", "d"]})
    (tmp_path / "inference.json").write_text(classes)
    tokens = torch.randint(4, (3, 9), generator=torch.Generator().manual_seed(0))
    batches = [(tokens[:, :-1], tokens[:, 1:])]

    def written(length):
        """Return the text, and the state of the generator behind the training."""
        gallery = Gallery()
        text = GeneratedText(count=1, prompt=4, length=length)
        callbacks = {"gallery": gallery, "text": text}
        options = {
            "task": LanguageModel(4),
            "model": nn.Embedding(4, 4),
            "train": batches,
        }
        trainer_of(callbacks, tmp_path, max_epochs=1, **options).fit()
        _, shown = gallery.shown["generated/text"][0]
        return shown, torch.get_rng_state()

    short, state_after_short = written(length=1)
    long, state_after_long = written(length=30)

    prompt = "".join("abcd"[token] for token in tokens[0, :4])

    assert short.startswith(f"    {prompt}")
    assert long.startswith(f"    {prompt}")
    assert len(short) == 4 + 4 + 1
    assert len(long) == 4 + 4 + 30
    assert torch.equal(state_after_short, state_after_long)


def test_texts_of_a_run_are_logged_once(tmp_path):
    (tmp_path / "config.yaml").write_text("seed: 3\n")
    (tmp_path / "overrides.yaml").write_text("- seed=3\n")
    gallery = Gallery()

    trainer_of({"texts": Texts(), "gallery": gallery}, tmp_path, max_epochs=2).fit()

    for name, shown in gallery.shown.items():
        assert len(shown) == 1, name

    _, config = gallery.shown["run/config"][0]
    _, overrides = gallery.shown["run/overrides"][0]
    assert config == "    seed: 3"
    assert overrides == "    - seed=3"


def test_a_graph_needs_tensorboard(make_trainer):
    with pytest.raises(CallbackError, match=r"callbacks\.graph needs callbacks\.tensorboard"):
        make_trainer({"graph": Graph()}).fit()


def test_a_model_that_cannot_be_traced_trains_without_its_graph(make_trainer, tmp_path, caplog):
    class Untraceable(nn.Linear):
        def forward(self, inputs):
            if torch.jit.is_tracing():
                raise RuntimeError("not this one")
            return super().forward(inputs)

    callbacks = {"tensorboard": TensorBoard(), "graph": Graph()}
    model = Untraceable(4, 2).double()

    make_trainer(callbacks, tmp_path / "run", model=model).fit()

    (record,) = caplog.records
    warning = record.getMessage()

    assert warning == "callbacks.graph: not this one; training continues without it"


def test_a_graph_has_the_layers_of_the_model(make_trainer, tmp_path):
    callbacks = {"tensorboard": TensorBoard(), "graph": Graph()}

    make_trainer(callbacks, tmp_path / "run").fit()

    board = EventAccumulator(str(tmp_path / "run" / "tensorboard"))
    graph = board.Reload().Graph()

    assert any("Linear" in node.name for node in graph.node)


def test_a_sample_without_a_label_is_shown_with_its_prediction_only():
    val = images(2, 1)
    for _, labels in val:
        labels.fill_(-100)
        labels[0] = 1
    gallery = Gallery()
    callbacks = {"gallery": gallery, "val": ValidationSamples()}

    trainer_of(callbacks, val=val, max_epochs=1).fit()

    assert gallery.steps("samples/val") == [3]
