"""Batches of named tensors: the loss is the mean over the learnt tokens of the whole update."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import toys
from regimen.trainer.errors import ModelError, SampleError
from regimen.trainer.tasks.chat import Chat
from toys import assert_equal, loader

LENGTH = 8


class Reader(nn.Module):
    """Logits [n, length, tokens] from each token and its position, called by name."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(12, 6)
        self.places = nn.Embedding(LENGTH, 6)
        self.head = nn.Linear(6, 12)

    def forward(self, input_ids, position_ids):
        hidden = self.embed(input_ids) + self.places(position_ids)
        return self.head(torch.tanh(hidden))


class Rows(torch.utils.data.Dataset):
    """Rows with between 0 and 7 learnt tokens, another number in each."""

    def __init__(self, count=24):
        generator = torch.Generator().manual_seed(3)
        self.tokens = torch.randint(12, (count, LENGTH), generator=generator)

    def __len__(self):
        return len(self.tokens)

    def __getitem__(self, index):
        labels = self.tokens[index].clone()
        labels[index % LENGTH + 1 :] = -100
        positions = torch.arange(LENGTH) % 5
        return {"input_ids": self.tokens[index], "position_ids": positions, "labels": labels}


def batch_of(rows, indices=None):
    """Return the rows, or those of the indices, as one batch."""
    if indices is None:
        indices = range(len(rows))
    return torch.utils.data.default_collate([rows[i] for i in indices])


def by_hand(model, batch):
    """Return the sum of the losses of the learnt tokens, their number, and the right ones."""
    all_logits = model(batch["input_ids"], batch["position_ids"])
    total = 0.0
    count = 0
    correct = 0
    for row, labels in zip(all_logits, batch["labels"], strict=True):
        for logits, label in zip(row[:-1], labels[1:], strict=True):  # of the next token
            if label == -100:
                continue
            total = total + F.cross_entropy(logits, label)
            count += 1
            if logits.argmax() == label:
                correct += 1
    return total, count, correct


def trained_by_hand(epochs=2):
    """Train with a loop as anyone would write it, on whole batches."""
    rows = Rows()
    numbers = torch.arange(len(rows))
    order = toys.Samples(numbers, numbers)
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for indices, _ in toys.whole_batches(order, epochs):
        total, count, _ = by_hand(model, batch_of(rows, indices.tolist()))
        loss = total / count
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model


def network():
    torch.manual_seed(3)
    return Reader().double()


@pytest.mark.parametrize("steps", [1, 2, 4])
def test_an_update_is_the_mean_over_its_learnt_tokens(steps):
    val = loader(Rows(), batch=5, shuffled=False)
    trainer = toys.trainer_of(Chat(), loader(Rows(), steps), model=network(), val=val)
    trainer.fit()

    assert_equal(trainer.model, trained_by_hand())

    with torch.no_grad():
        total, count, correct = by_hand(trainer.model, batch_of(Rows()))
    loss = total / count
    found = trainer.evaluate()

    assert found["val/loss"] == pytest.approx(loss.item(), rel=1e-12)
    assert found["val/token_accuracy"] == correct / count
    assert found["val/perplexity"] == pytest.approx(loss.exp().item(), rel=1e-12)


def test_a_batch_or_an_answer_of_another_form_is_refused():
    task = Chat()
    batch = batch_of(Rows(4))

    with pytest.raises(SampleError, match="takes a dict with input_ids and labels"):
        task.training_step(network(), (batch["input_ids"], batch["labels"]))
    with pytest.raises(SampleError, match="a batch has no labels"):
        task.training_step(network(), {"input_ids": batch["input_ids"]})
    with pytest.raises(ModelError, match=r"where task=chat takes logits \[n, length"):
        task.training_step(lambda **inputs: torch.zeros(4, 8), batch)


def test_a_collator_of_transformers_makes_batches_for_it():
    transformers = pytest.importorskip("transformers", reason="the extra transformers is missing")
    from toy_chat import make_tokenizer

    tokenizer = make_tokenizer()
    tokenizer.pad_token = tokenizer.eos_token
    collate = transformers.DataCollatorForSeq2Seq(tokenizer, return_tensors="pt")
    rows = [
        {"input_ids": [5, 6, 7, 8], "labels": [-100, 6, 7, 8]},
        {"input_ids": [5, 6], "labels": [-100, 6]},
        {"input_ids": [5, 6, 7], "labels": [-100, 6, 7]},
    ]
    config = transformers.LlamaConfig(
        vocab_size=512,
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=16,
    )
    model = transformers.LlamaForCausalLM(config).double()
    task = Chat()

    total = 0.0
    for row in rows:
        tokens = torch.tensor([row["input_ids"]])
        logits = model(input_ids=tokens).logits[0, :-1]
        labels = torch.tensor(row["labels"][1:])
        total = total + F.cross_entropy(logits, labels, reduction="sum")
    expected = total / 6  # learnt tokens

    batch = dict(collate(rows))
    found = task.training_step(model, dict(batch)).loss[""]
    answers = task.prediction_step(model, dict(batch))

    assert int(task.counts(batch)[""]) == 6
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=0)
    assert answers.shape == (3, 4, 512)
