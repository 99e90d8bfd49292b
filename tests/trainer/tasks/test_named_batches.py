"""Batches {"input_ids", ..., "labels"}: every task calls the model by name, whoever built it."""

from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import toys
from regimen.trainer.errors import ModelError, SampleError
from regimen.trainer.task import Task
from regimen.trainer.tasks.classification import Classification
from regimen.trainer.tasks.language_model import LanguageModel
from regimen.trainer.tasks.multilabel import MultiLabel
from regimen.trainer.tasks.own_loss import OwnLoss
from regimen.trainer.tasks.regression import Regression
from regimen.trainer.tasks.token_classification import EntityF1, TokenClassification
from toys import assert_equal, loader, trainer_of

LENGTH = 6
TAGS = ["O", "B-PER", "I-PER", "B-LOC", "I-LOC"]


class Answer:
    """What models of transformers return."""

    def __init__(self, loss, logits):
        self.loss = loss
        self.logits = logits


class Reader(nn.Module):
    """Outputs [n, outputs], or [n, length, outputs], of the tokens that the mask shows."""

    def __init__(self, outputs, by_token=False, returns=None):
        super().__init__()
        self.embed = nn.Embedding(12, 7)
        self.head = nn.Linear(7, outputs)
        self.by_token = by_token
        self.returns = returns or (lambda loss, logits: logits)

    def forward(self, input_ids, attention_mask, labels=None):
        seen = self.embed(input_ids) * attention_mask[..., None]
        lengths = attention_mask.sum(1)[:, None, None]
        mean = seen.sum(1, keepdim=True) / lengths
        hidden = seen + mean if self.by_token else mean[:, 0]
        logits = self.head(torch.tanh(hidden))
        loss = None
        if labels is not None:
            loss = F.cross_entropy(logits.flatten(0, -2), labels.flatten())
        return self.returns(loss, logits)


def model_of(outputs, **options):
    torch.manual_seed(3)
    return Reader(outputs, **options).double()


class Texts(torch.utils.data.Dataset):
    """Texts of 2 to 6 tokens with a label of any kind."""

    def __init__(self, labels):
        self.labels = labels
        self.tokens = torch.randint(12, (len(labels), LENGTH), generator=_generator())

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        length = 2 + index % 5
        mask = (torch.arange(LENGTH) < length).long()
        return {
            "input_ids": self.tokens[index] * mask,
            "attention_mask": mask,
            "labels": self.labels[index],
        }


def _generator():
    return torch.Generator().manual_seed(3)


def tags_of_words():
    """Return labels [23, LENGTH] of between none and six words."""
    labels = torch.randint(5, (23, LENGTH), generator=_generator())
    for number, row in enumerate(labels):
        words = number % (LENGTH + 1)
        row[words:] = -100
    return labels


def loss_of_values(output, target):
    return F.mse_loss(output[:, 0], target)


def loss_of_tokens(output, target):
    return F.cross_entropy(output.flatten(0, 1), target.flatten())


class Case(NamedTuple):
    task: Callable[[], Task]
    outputs: int
    labels: torch.Tensor  # of the 23 texts
    loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]  # of whole batches


CASES = {
    "classification": Case(
        lambda: Classification(3),
        3,
        torch.randint(3, (23,), generator=_generator()),
        F.cross_entropy,
    ),
    "regression": Case(
        Regression,
        1,
        torch.randn(23, generator=_generator(), dtype=torch.float64),
        loss_of_values,
    ),
    "multilabel": Case(
        MultiLabel,
        4,
        torch.randint(2, (23, 4), generator=_generator()).double(),
        F.binary_cross_entropy_with_logits,
    ),
    "token_classification": Case(
        lambda: TokenClassification(5, classes=TAGS),
        5,
        tags_of_words(),
        loss_of_tokens,
    ),
}


def trained_by_hand(outputs, labels, loss_of, by_token):
    data = Texts(labels)
    numbers = torch.arange(len(data))
    order = toys.Samples(numbers, numbers)
    model = model_of(outputs, by_token=by_token)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for indices, _ in toys.whole_batches(order, 2):
        samples = [data[i] for i in indices.tolist()]
        batch = torch.utils.data.default_collate(samples)
        target = batch.pop("labels")
        optimizer.zero_grad()
        loss = loss_of(model(**batch), target)
        loss.backward()
        optimizer.step()
    return model


@pytest.mark.parametrize("steps", [1, 2, 4])
@pytest.mark.parametrize("name", CASES)
def test_an_update_is_that_by_hand(name, steps):
    case = CASES[name]
    by_token = name == "token_classification"
    returns = Answer if steps == 2 else None
    model = model_of(case.outputs, by_token=by_token, returns=returns)
    trainer = trainer_of(case.task(), loader(Texts(case.labels), steps), model=model)
    trainer.fit()

    expected = trained_by_hand(case.outputs, case.labels, case.loss, by_token)

    assert_equal(trainer.model, expected)


def test_the_labels_are_no_input_of_a_prediction():
    texts = Texts(CASES["classification"].labels)
    batch = torch.utils.data.default_collate([texts[i] for i in range(8)])
    task = Classification(3)
    model = model_of(3)
    with_labels = task.prediction_step(model, batch)
    del batch["labels"]

    assert torch.equal(task.prediction_step(model, batch), with_labels)


def test_a_model_that_takes_the_dict_itself_still_gets_it():
    class Whole(nn.Module):
        def forward(self, values):
            return values["x"]

    task = Classification(3)
    inputs = {"x": torch.zeros(2, 3)}
    labels = torch.zeros(2, dtype=torch.long)
    answer = task.prediction_step(Whole(), inputs)
    output = task.training_step(Whole(), (inputs, labels))

    assert answer.shape == (2, 3)
    assert output.loss[""] > 0


def as_pair(loss, logits):
    return loss, logits


@pytest.mark.parametrize("returns", [Answer, as_pair])
def test_the_loss_that_a_model_computes_itself(returns):
    labels = tags_of_words()
    task = TokenClassification(5, classes=TAGS)
    plain = trainer_of(task, loader(Texts(labels)), model=model_of(5, by_token=True))
    plain.fit()

    own_loss = OwnLoss(TokenClassification(5, classes=TAGS))
    model = model_of(5, by_token=True, returns=returns)
    own = trainer_of(own_loss, loader(Texts(labels), 2), model=model)
    own.fit()

    assert_equal(own.model, plain.model)


def test_a_loss_of_ones_own_for_a_language_model_is_the_task_chat():
    labels = tags_of_words()
    with pytest.raises(SampleError, match="task=chat"):
        OwnLoss(LanguageModel(5)).counts({"input_ids": labels, "labels": labels})


def test_a_batch_without_labels_says_what_fits():
    task = Classification(3)
    batch = {"input_ids": torch.zeros(2, 3), "label": torch.zeros(2)}
    with pytest.raises(SampleError, match="a dict whose 'labels' are the target"):
        task.training_step(model_of(3), batch)
    with pytest.raises(SampleError, match="texts as targets"):
        task.training_step(model_of(3), {"input_ids": None, "labels": ["a"]})


def expected_f1(model, data):
    """Return F1 by seqeval over all sentences."""
    from seqeval.metrics import f1_score

    true = []
    found = []
    for number in range(len(data)):
        sample = data[number]
        (logits,) = model(sample["input_ids"][None], sample["attention_mask"][None])
        counts = sample["labels"] >= 0
        found.append([TAGS[tag] for tag in logits.argmax(1)[counts]])
        true.append([TAGS[tag] for tag in sample["labels"][counts]])
    return f1_score(true, found)


@pytest.mark.parametrize("batch", [1, 5, 23])
def test_f1_is_that_of_seqeval_on_all(batch):
    data = Texts(tags_of_words())
    val = loader(data, batch=batch, shuffled=False)
    task = TokenClassification(5, classes=TAGS)
    model = model_of(5, by_token=True)
    trainer = trainer_of(task, loader(data), model=model, val=val, max_epochs=9)
    trainer.fit()

    found = trainer.evaluate()["val/f1"]

    assert found == pytest.approx(expected_f1(trainer.model, data), rel=1e-12)
    assert 0 < found < 1
    assert task.monitor() == "f1"


def test_two_processes_train_and_count_the_same(ranks):
    data = Texts(tags_of_words())

    def train(strategy):
        trainer = trainer_of(
            TokenClassification(5, classes=TAGS),
            loader(data, strategy=strategy),
            model=model_of(5, by_token=True),
            val=loader(data, batch=5, shuffled=False, strategy=strategy),
            strategy=strategy,
        )
        trainer.fit()
        weights = {name: p.detach() for name, p in trainer.model.named_parameters()}
        return weights, trainer.evaluate()

    expected_weights, expected_metrics = train(None)
    for weights, metrics in ranks(2, toys.in_group(train)):
        torch.testing.assert_close(weights, expected_weights, rtol=0, atol=1e-12)
        assert metrics == pytest.approx(expected_metrics, rel=1e-12)


def test_tags_that_mark_no_entities_and_unknown_tags():
    with pytest.raises(ModelError, match=r"task\.entities: is true, and the tags 'NOUN'"):
        TokenClassification(2, classes=["NOUN", "O"])

    metric = EntityF1()
    metric.update(torch.zeros(1, 5, 2), torch.zeros(1, 2, dtype=torch.long))
    with pytest.raises(ModelError, match=r"task\.classes"):
        metric.compute()

    plain = TokenClassification(2, entities=False)
    assert plain.metric_names() == ["loss", "token_accuracy"]
    assert plain.monitor() == "token_accuracy"
