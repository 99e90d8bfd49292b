"""Batches {"input_ids", ..., "labels"}: every task calls the model by name, whoever built it."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import toys
from regimen.trainer.errors import ModelError, SampleError
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
        mean = seen.sum(1, keepdim=True) / attention_mask.sum(1)[:, None, None]
        logits = self.head(torch.tanh(seen + mean if self.by_token else mean[:, 0]))
        loss = None
        if labels is not None:
            loss = F.cross_entropy(logits.flatten(0, -2), labels.flatten())
        return self.returns(loss, logits)


def model_of(outputs, **options):
    torch.manual_seed(3)
    return Reader(outputs, **options).double()


class Texts(torch.utils.data.Dataset):
    """Texts of 2 to 6 tokens with a label of any kind."""

    def __init__(self, labels, pair=False):
        self.labels = labels
        self.tokens = torch.randint(12, (len(labels), LENGTH), generator=_generator())
        self.pair = pair

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        mask = (torch.arange(LENGTH) < 2 + index % 5).long()
        inputs = {"input_ids": self.tokens[index] * mask, "attention_mask": mask}
        return {**inputs, "labels": self.labels[index]}


def _generator():
    return torch.Generator().manual_seed(3)


def tags_of_words():
    """Return labels [23, LENGTH] of between none and six words."""
    labels = torch.randint(5, (23, LENGTH), generator=_generator())
    for number, row in enumerate(labels):
        row[number % (LENGTH + 1) :] = -100
    return labels


CASES = {
    "classification": (
        lambda: Classification(3),
        3,
        torch.randint(3, (23,), generator=_generator()),
        F.cross_entropy,
    ),
    "regression": (
        Regression,
        1,
        torch.randn(23, generator=_generator(), dtype=torch.float64),
        lambda output, target: F.mse_loss(output[:, 0], target),
    ),
    "multilabel": (
        MultiLabel,
        4,
        torch.randint(2, (23, 4), generator=_generator()).double(),
        F.binary_cross_entropy_with_logits,
    ),
    "token_classification": (
        lambda: TokenClassification(5, classes=TAGS),
        5,
        tags_of_words(),
        lambda output, target: F.cross_entropy(output.flatten(0, 1), target.flatten()),
    ),
}


def trained_by_hand(outputs, labels, loss, by_token):
    data = Texts(labels)
    model = model_of(outputs, by_token=by_token)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    order = toys.Samples(torch.arange(len(data)), torch.arange(len(data)))
    for indices, _ in toys.whole_batches(order, 2):
        samples = [data[i] for i in indices.tolist()]
        batch = {name: torch.stack([sample[name] for sample in samples]) for name in samples[0]}
        target = batch.pop("labels")
        optimizer.zero_grad()
        loss(model(**batch), target).backward()
        optimizer.step()
    return model


@pytest.mark.parametrize("steps", [1, 2, 4])
@pytest.mark.parametrize("name", CASES)
def test_an_update_is_that_by_hand(name, steps):
    make, outputs, labels, loss = CASES[name]
    by_token = name == "token_classification"
    model = model_of(outputs, by_token=by_token, returns=Answer if steps == 2 else None)
    trainer = trainer_of(make(), loader(Texts(labels), steps), model=model)
    trainer.fit()
    assert_equal(trainer.model, trained_by_hand(outputs, labels, loss, by_token))


def test_the_labels_are_no_input_of_a_prediction():
    batch = next(iter(loader(Texts(CASES["classification"][2])).epoch(0))).batch
    task = Classification(3)
    model = model_of(3)
    with_labels = task.prediction_step(model, batch)
    del batch["labels"]
    assert torch.equal(task.prediction_step(model, batch), with_labels)


def test_a_model_that_takes_the_dict_itself_still_gets_it():
    class Whole(nn.Module):
        def forward(self, values):
            return values["x"]

    batch = {"x": torch.zeros(2, 3)}
    assert Classification(3).prediction_step(Whole(), batch).shape == (2, 3)
    pair = (batch, torch.zeros(2, dtype=torch.long))
    assert Classification(3).training_step(Whole(), pair).loss[""] > 0


def test_the_loss_that_a_model_computes_itself():
    labels = tags_of_words()
    task = TokenClassification(5, classes=TAGS)
    plain = trainer_of(task, loader(Texts(labels)), model=model_of(5, by_token=True))
    plain.fit()
    for returns in (Answer, lambda loss, logits: (loss, logits)):
        model = model_of(5, by_token=True, returns=returns)
        own = trainer_of(
            OwnLoss(TokenClassification(5, classes=TAGS)), loader(Texts(labels), 2), model=model
        )
        own.fit()
        assert_equal(own.model, plain.model)
    batch = {"input_ids": labels, "labels": labels}
    with pytest.raises(SampleError, match="task=chat"):
        OwnLoss(LanguageModel(5)).counts(batch)


def test_a_batch_without_labels_says_what_fits():
    batch = {"input_ids": torch.zeros(2, 3), "label": torch.zeros(2)}
    with pytest.raises(SampleError, match="a dict whose 'labels' are the target"):
        Classification(3).training_step(model_of(3), batch)
    with pytest.raises(SampleError, match="texts as targets"):
        Classification(3).training_step(model_of(3), {"input_ids": None, "labels": ["a"]})


def expected_f1(model, data):
    """Return F1 by seqeval over all sentences."""
    from seqeval.metrics import f1_score

    true, found = [], []
    for sample in (data[i] for i in range(len(data))):
        logits = model(sample["input_ids"][None], sample["attention_mask"][None])[0]
        counts = sample["labels"] >= 0
        found.append([TAGS[n] for n in logits.argmax(1)[counts]])
        true.append([TAGS[n] for n in sample["labels"][counts]])
    return f1_score(true, found)


@pytest.mark.parametrize("batch", [1, 5, 23])
def test_f1_is_that_of_seqeval_on_all(batch):
    data = Texts(tags_of_words())
    val = loader(data, batch=batch, shuffled=False)
    task = TokenClassification(5, classes=TAGS)
    trainer = trainer_of(
        task, loader(data), model=model_of(5, by_token=True), val=val, max_epochs=9
    )
    trainer.fit()
    found = trainer.evaluate()
    assert found["val/f1"] == pytest.approx(expected_f1(trainer.model, data), rel=1e-12)
    assert 0 < found["val/f1"] < 1
    assert task.monitor() == "f1"


def test_two_processes_train_and_count_the_same(ranks):
    labels = tags_of_words()

    def train(strategy):
        data = Texts(labels)
        trainer = trainer_of(
            TokenClassification(5, classes=TAGS),
            loader(data, strategy=strategy),
            model=model_of(5, by_token=True),
            val=loader(data, batch=5, shuffled=False, strategy=strategy),
            strategy=strategy,
        )
        trainer.fit()
        state = {name: p.detach() for name, p in trainer.model.named_parameters()}
        return state, trainer.evaluate()

    alone = trainer_of(
        TokenClassification(5, classes=TAGS),
        loader(Texts(labels)),
        model=model_of(5, by_token=True),
        val=loader(Texts(labels), batch=5, shuffled=False),
    )
    alone.fit()
    for state, metrics in ranks(2, toys.in_group(train)):
        for name, value in alone.model.named_parameters():
            torch.testing.assert_close(state[name], value.detach(), rtol=0, atol=1e-12)
        assert metrics == pytest.approx(alone.evaluate(), rel=1e-12)


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
