"""Losses made of terms, and penalties on gradients, against the same written by hand."""

import functools

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import toys
from regimen.trainer.errors import ModelError, SampleError, _solution
from regimen.trainer.tasks.classification import Classification
from regimen.trainer.tasks.losses import BinaryCrossEntropy, Losses, Term, vector
from regimen.trainer.tasks.own_loss import OwnLoss
from regimen.trainer.tasks.penalties import GradientPenalty
from toys import (
    CLASSES,
    SAMPLES,
    Samples,
    assert_equal,
    by_hand,
    distance,
    in_group,
    of_output,
    points,
)


def soft_points():
    """Return points with shares of the classes."""
    data = points()
    generator = torch.Generator().manual_seed(8)
    values = torch.rand(SAMPLES, CLASSES, dtype=torch.float64, generator=generator)
    shares = values / values.sum(1, keepdim=True)
    return Samples(data.x, shares)


def trained(loss, steps, data):
    task = Classification(CLASSES, loss)
    trainer = toys.trainer_of(task, data, steps, val=toys.loader(data))
    trainer.fit()
    return trainer


@pytest.mark.parametrize("steps", [1, 3])
@pytest.mark.parametrize("options", [{}, {"label_smoothing": 0.1}, {"weight": vector([1, 2, 5])}])
def test_soft_targets(options, steps):
    """torch divides by the number of samples there, not by their weights."""
    data = soft_points()
    loss = nn.CrossEntropyLoss(**options)
    trainer = trained(loss, steps, data)  # in float64, as the weights are from here on
    assert_equal(trainer.model, by_hand(of_output(loss), data))


def classes_apart(threshold):
    """Return the binary cross-entropy of each class on its own, written out."""

    def loss(output, target):
        if not target.is_floating_point():
            target = F.one_hot(target, CLASSES).to(output.dtype)
        if threshold is not None:
            target = target.gt(threshold).to(output.dtype)
        by_class = -target * F.logsigmoid(output) - (1 - target) * F.logsigmoid(-output)
        return by_class.sum() / (len(output) * CLASSES)

    return loss


@pytest.mark.parametrize("steps", [1, 2, 4])
@pytest.mark.parametrize("threshold", [None, 0.2])
@pytest.mark.parametrize("make", [points, soft_points])
def test_binary_cross_entropy_takes_labels_and_mixed_ones(make, threshold, steps):
    data = make()
    trainer = trained(BinaryCrossEntropy(threshold), steps, data)

    expected = by_hand(of_output(classes_apart(threshold)), data)

    assert_equal(trainer.model, expected)

    if make is soft_points:  # of labels a threshold changes nothing
        other_loss = classes_apart(None if threshold else 0.2)
        other = by_hand(of_output(other_loss), data)
        assert distance(trainer.model, other) > 1e-6


@pytest.mark.parametrize("threshold", [-0.1, 1, float("nan")])
def test_a_threshold_that_is_no_share_is_refused(threshold):
    with pytest.raises(ModelError, match=r"task\.loss\.target_threshold: expected a share"):
        BinaryCrossEntropy(threshold)


def scaled(output, target, scale):
    return scale * F.cross_entropy(output, target)


@pytest.mark.parametrize("steps", [1, 3])
@pytest.mark.parametrize(
    ("function", "as_module"),
    [
        pytest.param(F.cross_entropy, nn.CrossEntropyLoss(), id="torch's"),
        pytest.param(
            functools.partial(F.cross_entropy, label_smoothing=0.2),
            nn.CrossEntropyLoss(label_smoothing=0.2),
            id="with an argument",
        ),
        pytest.param(
            functools.partial(F.cross_entropy, reduction="sum"),
            nn.CrossEntropyLoss(reduction="sum"),
            id="a sum",
        ),
    ],
)
def test_a_function_is_the_loss_of_its_name(function, as_module, steps):
    data = points()
    trainer = trained(function, steps, data)
    assert type(trainer.task.losses.terms[""].loss) is nn.CrossEntropyLoss
    assert_equal(trainer.model, by_hand(of_output(as_module), data))


@pytest.mark.parametrize("steps", [1, 3])
def test_a_function_of_ones_own_is_a_mean_over_the_samples(steps):
    data = points()
    function = functools.partial(scaled, scale=2.0)
    trainer = trained(function, steps, data)
    assert_equal(trainer.model, by_hand(of_output(function), data))


@pytest.mark.parametrize(
    ("text", "named"),
    [("mse", "MSELoss"), ("torch.nn.L1Loss", "L1Loss"), ("cross_entropy", "CrossEntropyLoss")],
)
def test_a_word_is_no_loss_and_told_how_to_write_it(text, named):
    with pytest.raises(ModelError, match=rf"task\.loss: is '{text}'.*torch\.nn\.{named}}}"):
        Losses(text)


@pytest.mark.parametrize(
    ("batch", "told"),
    [
        (None, r"nothing \(None\).*return \(inputs, target\)"),
        (
            {"image": torch.zeros(2), "label": torch.zeros(2)},
            r"\(sample\['image'\], sample\['label'\]",
        ),
        (torch.zeros(2, 3), r"make a batch float32 \[2, 3\]"),
        ([torch.zeros(2), torch.zeros(2), torch.zeros(2)], r"takes pairs"),
        ((torch.zeros(2), None), "None as a target"),
        ((torch.zeros(2), ("cat", "dog")), r"texts as targets \('cat', \.\.\.\): .*classes\.index"),
    ],
    ids=["none", "dict", "inputs", "three", "no target", "texts"],
)
def test_what_a_data_set_returned_is_told(batch, told):
    task = Classification(2)
    with pytest.raises(SampleError, match=f"the data set returned .*{told}"):
        task.counts(batch)
    with pytest.raises(SampleError, match=f"the data set returned .*{told}"):
        task.training_step(nn.Identity(), batch)


@pytest.mark.parametrize(
    ("layer", "shape"),
    [
        pytest.param(nn.Linear(4, 2), (2, 4), id="Linear"),
        pytest.param(nn.Conv2d(3, 2, 1), (2, 3, 4, 4), id="Conv2d"),
        pytest.param(nn.Conv1d(3, 2, 1), (2, 3, 4), id="Conv1d"),
    ],
)
@pytest.mark.parametrize("kind", [torch.float64, torch.uint8, torch.int64], ids=str)
def test_inputs_of_another_type_are_told_what_to_return(layer, shape, kind):
    inputs = torch.ones(shape, dtype=kind)
    with pytest.raises(RuntimeError) as caught:
        layer(inputs)

    solution = _solution(str(caught.value))
    assert solution is not None
    assert "should be float32, as inputs.float() is" in solution


SUM = nn.CrossEntropyLoss(reduction="sum")
PENALTIES = {
    "of the loss": GradientPenalty("inputs", SUM),
    "of the outputs": GradientPenalty(),
    "from a norm": GradientPenalty(target=1.0),
    "on parameters": GradientPenalty("parameters", nn.CrossEntropyLoss()),
}


def penalised(kind):
    return {"ce": nn.CrossEntropyLoss(), "penalty": Term(PENALTIES[kind], 0.3)}


def slope_at_inputs(score_of, model, x):
    """Return the gradient [n, features] of a score at the inputs, and the outputs there."""
    x = x.clone().requires_grad_()
    output = model(x)
    (slope,) = torch.autograd.grad(score_of(output), x, create_graph=True)
    return slope, output


def of_the_loss(model, x, y):
    slope, output = slope_at_inputs(lambda output: SUM(output, y), model, x)
    penalty = slope.square().sum(1).mean()
    return F.cross_entropy(output, y) + 0.3 * penalty


def of_the_outputs(model, x, y):
    slope, output = slope_at_inputs(torch.sum, model, x)
    penalty = slope.square().sum(1).mean()
    return F.cross_entropy(output, y) + 0.3 * penalty


def from_a_norm(model, x, y):
    slope, output = slope_at_inputs(torch.sum, model, x)
    penalty = (slope.norm(dim=1) - 1.0).square().mean()
    return F.cross_entropy(output, y) + 0.3 * penalty


def on_parameters(model, x, y):
    loss = F.cross_entropy(model(x), y)
    slopes = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
    penalty = sum(slope.square().sum() for slope in slopes)
    return loss + 0.3 * penalty


@pytest.mark.parametrize(
    ("kind", "objective", "all_steps", "tolerance"),
    [
        pytest.param("of the loss", of_the_loss, (1, 2, 3, 8), 1e-12, id="of the loss"),
        pytest.param("of the outputs", of_the_outputs, (1, 2, 3, 8), 1e-12, id="of the outputs"),
        # The root is guarded against 0.
        pytest.param("from a norm", from_a_norm, (1, 2, 3, 8), 1e-8, id="from a norm"),
        # The square of a mean over samples is no such mean: split up, it is another penalty.
        pytest.param("on parameters", on_parameters, (1,), 1e-12, id="on parameters"),
    ],
)
def test_penalties_are_those_written_by_hand(kind, objective, all_steps, tolerance):
    data = points()
    wanted = by_hand(objective, data)
    without = by_hand(of_output(F.cross_entropy), data)

    assert distance(wanted, without) > 1e-4

    for steps in all_steps:
        trainer = trained(penalised(kind), steps, data)
        assert_equal(trainer.model, wanted, tolerance)


def test_terms_are_logged_and_penalties_are_of_training_alone():
    trainer = trained(penalised("of the loss"), 2, points())

    metrics = trainer.metrics
    total = metrics["train/loss_ce"] + metrics["train/loss_penalty"]

    assert metrics["train/loss"] == pytest.approx(total)
    assert metrics["train/loss_penalty"] > 0
    assert metrics["val/loss"] == pytest.approx(metrics["val/loss_ce"])
    assert "val/loss_penalty" not in metrics

    of_validation = {name for name in metrics if name.startswith("val/")}
    assert of_validation == {f"val/{name}" for name in trainer.task.metric_names()}


def test_a_term_that_is_null_is_left_out():
    losses = Losses({"ce": nn.CrossEntropyLoss(), "margin": None})
    assert losses.names == ["loss", "loss_ce"]


def of_whole_numbers():
    losses = Losses(penalised("of the loss"))
    losses.prepare_inputs(torch.zeros(2).long())


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: GradientPenalty("inputs", nn.CrossEntropyLoss()), "reduction: sum"),
        (lambda: GradientPenalty("parameters"), "needs a loss"),
        (lambda: Losses(GradientPenalty()), "only gradient penalties"),
        (of_whole_numbers, "floating-point"),
    ],
)
def test_what_cannot_be_penalised_is_refused(make, message):
    with pytest.raises(ModelError, match=message):
        make()


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("shape", [(6,), (4, 5), (2, 4, 5)], ids=["n", "images", "volumes"])
@pytest.mark.parametrize("kind", [nn.CrossEntropyLoss, nn.NLLLoss])
def test_labels_of_places_give_the_loss_of_torch(kind, shape, reduction):
    """Flattened, as GPUs have no deterministic kernel for images of labels."""
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(3, 3, *shape, generator=generator, dtype=torch.float64)
    target = torch.randint(3, (3, *shape), generator=generator)
    weight = torch.tensor([1.0, 2.0, 0.5], dtype=torch.float64)
    loss = kind(weight=weight, ignore_index=2, reduction=reduction)
    losses = Losses(loss)

    def ours(outputs, target):
        values, _ = losses(outputs, target)
        return values[""]

    def value_and_gradient(function):
        leaf = logits.clone().requires_grad_()
        value = function(leaf.log_softmax(1), target)
        value.sum().backward()
        return value.detach(), leaf.grad

    found = value_and_gradient(ours)
    expected = value_and_gradient(loss)

    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


def as_dict(loss, logits):
    return {
        "loss": loss,
        "logits": logits,
        "hidden_states": (logits, logits),
        "cache": None,
    }


def as_output_alone(loss, logits):
    return {"prediction": logits, "loss": loss}


def turned(loss, logits):
    return logits, loss


FORMS = [
    pytest.param(lambda loss, logits: (loss, logits), id="loss, output"),
    pytest.param(turned, id="output, loss"),
    pytest.param(as_dict, id="dict"),
    pytest.param(as_output_alone, id="dict of two"),
]


class Answering(nn.Module):
    """Return logits, or with labels the mean over those that are not -100, as transformers do."""

    form = staticmethod(lambda loss, logits: (loss, logits))

    def __init__(self):
        super().__init__()
        self.body = toys.network()

    def forward(self, inputs, labels=None):
        logits = self.body(inputs)
        if labels is None:
            return logits
        return self.form(F.cross_entropy(logits, labels), logits)


class Targets(nn.Module):
    """Return (logits, loss), as nanoGPT does: the loss is None without targets."""

    def __init__(self):
        super().__init__()
        self.body = toys.network()

    def forward(self, inputs, targets=None):
        logits = self.body(inputs)
        loss = None
        if targets is not None:
            loss = F.cross_entropy(logits, targets, ignore_index=-1)
        return logits, loss


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("pieces", [1, 2])
def test_a_model_with_its_own_loss_trains_as_the_same_loss_of_a_task(pieces, form, monkeypatch):
    monkeypatch.setattr(Answering, "form", staticmethod(form))
    data = points()
    data.y[1:7] = -100  # uneven over the parts of a batch

    def run(task, steps):
        val = toys.loader(data, shuffled=False)
        model = Answering()
        trainer = toys.trainer_of(task, data, steps, model=model, val=val, log_every_n_steps=1)
        trainer.fit()
        return trainer

    by_task = run(Classification(CLASSES), 1)
    by_model = run(OwnLoss(Classification(CLASSES)), pieces)

    assert_equal(by_task.model, by_model.model)
    assert by_model.metrics == pytest.approx(by_task.metrics, rel=1e-12)


@pytest.mark.parametrize("labels", [None, "targets"])
def test_a_model_names_its_labels_and_its_ignored_label_as_it_likes(labels):
    data = points()
    data.y[1:7] = -1
    in_the_default_way = points()
    in_the_default_way.y[1:7] = -100
    task = Classification(CLASSES, nn.CrossEntropyLoss(ignore_index=-1))
    own = OwnLoss(task, labels, ignore_index=-1)
    by_model = toys.trainer_of(own, data, 2, model=Targets())
    by_task = toys.trainer_of(Classification(CLASSES), in_the_default_way, 1, model=Answering())
    by_model.fit()
    by_task.fit()

    assert_equal(by_task.model, by_model.model)
    torch.testing.assert_close(by_model.predict(data.x), by_task.predict(data.x))


def test_answers_that_are_lists_of_samples_are_joined_over_batches_of_any_size():
    class Finding(Classification):
        output_kind = "boxes"

        def interpret(self, output):
            return [{"scores": row} for row in output]

    x = points().x[:8]
    trainer = toys.trainer_of(Finding(CLASSES), points(), model=Answering())
    answers = trainer.predict([x[:3], x[3:7], x[7:]])

    scores = torch.stack([answer["scores"] for answer in answers])

    assert len(answers) == 8
    torch.testing.assert_close(scores, trainer.model(x))


def test_the_task_of_a_model_with_its_own_loss_is_told_of_epochs_and_evaluations():
    class Listening(Classification):
        def __init__(self):
            super().__init__(CLASSES)
            self.told = []

        def on_epoch_start(self, epoch):
            self.told.append(epoch)

        def on_evaluation_start(self, stage):
            self.told.append(stage)

    task = Listening()
    val = toys.loader(points(), shuffled=False)
    toys.trainer_of(OwnLoss(task), points(), model=Answering(), val=val, max_epochs=2).fit()

    assert task.told == [0, "val", 1, "val"]


class Leaning(Classification):
    """Scores that depend on all batches so far."""

    persistent = ("memory",)
    score_names = ("leaning",)

    def __init__(self):
        super().__init__(CLASSES)
        self.memory = torch.zeros(CLASSES)

    def scores(self, output, target):
        self.memory += output.detach().mean(0)
        return {"leaning": (self.memory.sum(), 1)}


def test_the_state_of_the_task_is_kept_from_evaluations_and_saved():
    def trainer_of(**options):
        return toys.trainer_of(OwnLoss(Leaning()), points(), model=Answering(), **options)

    plain = trainer_of(max_epochs=2)
    plain.fit()
    wanted = plain.task.task_state["memory"]

    assert wanted.any()
    assert wanted.dtype == torch.float64  # it is moved as the task is

    validated = trainer_of(max_epochs=2, val=toys.loader(points(), shuffled=False))
    validated.fit()
    assert torch.equal(validated.task.task_state["memory"], wanted)

    begun = trainer_of(max_epochs=1)
    begun.fit()
    resumed = trainer_of(max_epochs=2)
    resumed.load_state_dict(begun.state_dict())
    resumed.fit()

    assert torch.equal(resumed.task.task_state["memory"], wanted)


@pytest.mark.parametrize("persistent", ["memory", ("memories",)])
def test_wrong_names_of_the_state_of_the_task_are_refused(persistent, monkeypatch):
    monkeypatch.setattr(Leaning, "persistent", persistent)
    with pytest.raises(ModelError, match=r"Leaning\.persistent"):
        OwnLoss(Leaning())


def test_a_wrapped_model_is_asked_for_its_own_parameters(ranks):
    def train(strategy):
        task = OwnLoss(Classification(CLASSES))
        trainer = toys.trainer_of(task, points(), model=Targets(), strategy=strategy)
        trainer.fit()
        return trainer.model

    wanted = train(None)
    for model in ranks(2, in_group(train)):
        assert_equal(model, wanted)


TWO_SAMPLES = (torch.ones(2, 3), torch.tensor([0, 1]))


class Returning(nn.Module):
    """Return what it was made with."""

    def __init__(self, value):
        super().__init__()
        self.value = value

    def forward(self, inputs, labels=None):
        return self.value


@pytest.mark.parametrize(
    "value",
    [
        pytest.param((torch.ones(2), torch.ones(2, 3)), id="a loss for each sample"),
        pytest.param((torch.ones(2, 3), None), id="no loss"),
        pytest.param({"logits": torch.ones(2, 3)}, id="a dict without loss"),
        pytest.param({"loss": torch.ones(()), "a": torch.ones(2), "b": torch.ones(2)}, id="which"),
        pytest.param((torch.ones(()), torch.ones(2, 3), 1), id="three"),
        pytest.param(torch.ones(()), id="the loss alone"),
        pytest.param({"loss": 1.0, "logits": torch.ones(2, 3)}, id="a number"),
    ],
)
def test_what_holds_no_scalar_loss_and_one_output_is_refused(value):
    task = OwnLoss(Classification(3))
    with pytest.raises(ModelError, match=r"labels=\.\.\.\) returned .* where the loss is a scalar"):
        task.training_step(Returning(value), TWO_SAMPLES)


def test_a_model_that_takes_no_labels_is_named():
    class Plain(nn.Module):
        def forward(self, inputs, mask=None):
            return inputs

    task = OwnLoss(Classification(3))
    with pytest.raises(ModelError, match=r"Plain\.forward\(inputs, mask\) has none of .*labels"):
        task.training_step(Plain(), TWO_SAMPLES)


def test_a_model_without_a_loss_of_its_own_is_named():
    class Plain(nn.Module):
        def forward(self, inputs, labels=None):
            return inputs

    with pytest.raises(ModelError, match=r"Plain\.forward\(inputs, labels=\.\.\.\) returned"):
        OwnLoss(Classification(3)).training_step(Plain(), (torch.ones(2, 3), torch.tensor([0, 1])))
