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
        return self.head(torch.tanh(self.embed(input_ids) + self.places(position_ids)))


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
    samples = [rows[i] for i in (range(len(rows)) if indices is None else indices)]
    return {name: torch.stack([sample[name] for sample in samples]) for name in samples[0]}


def by_hand(model, batch):
    """Return the sum of the losses of the learnt tokens, their number, and the right ones."""
    logits = model(batch["input_ids"], batch["position_ids"])
    total, count, correct = 0.0, 0, 0
    for row, labels in zip(logits, batch["labels"], strict=True):
        for place in range(LENGTH - 1):
            label = labels[place + 1]
            if label != -100:
                total = total - F.log_softmax(row[place], 0)[label]
                count += 1
                correct += int(row[place].argmax() == label)
    return total, count, correct


def trained_by_hand(epochs=2):
    """Train with a loop as anyone would write it, on whole batches."""
    rows = Rows()
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    order = toys.Samples(torch.arange(len(rows)), torch.arange(len(rows)))
    for indices, _ in toys.whole_batches(order, epochs):
        total, count, _ = by_hand(model, batch_of(rows, indices.tolist()))
        optimizer.zero_grad()
        (total / count).backward()
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
    found = trainer.evaluate()
    assert found["val/loss"] == pytest.approx(float(total / count), rel=1e-12)
    assert found["val/token_accuracy"] == correct / count
    assert found["val/perplexity"] == pytest.approx(float((total / count).exp()), rel=1e-12)


def test_a_batch_or_an_answer_of_another_form_is_refused():
    batch = batch_of(Rows(4))
    with pytest.raises(SampleError, match="takes a dict with input_ids and labels"):
        Chat().training_step(network(), (batch["input_ids"], batch["labels"]))
    with pytest.raises(SampleError, match="a batch has no labels"):
        Chat().training_step(network(), {"input_ids": batch["input_ids"]})
    with pytest.raises(ModelError, match=r"where task=chat takes logits \[n, length"):
        Chat().training_step(lambda **inputs: torch.zeros(4, 8), batch)


def test_a_collator_of_transformers_makes_batches_for_it():
    transformers = pytest.importorskip("transformers", reason="the extra transformers is missing")
    from toy_chat import make_tokenizer

    tokenizer = make_tokenizer()
    tokenizer.pad_token = tokenizer.eos_token
    collate = transformers.DataCollatorForSeq2Seq(tokenizer, return_tensors="pt")
    rows = [{"input_ids": [5, 6, 7, 8][:n], "labels": [-100, 6, 7, 8][:n]} for n in (4, 2, 3)]
    model = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=512,
            hidden_size=16,
            num_hidden_layers=1,
            num_attention_heads=2,
            intermediate_size=16,
        )
    ).double()
    task = Chat()
    batch = collate(rows)
    losses = []
    for row in rows:
        logits = model(input_ids=torch.tensor([row["input_ids"]])).logits[0, :-1]
        labels = torch.tensor(row["labels"][1:])
        losses.append(F.cross_entropy(logits, labels, reduction="sum"))
    expected = sum(losses) / 6
    assert int(task.counts(dict(batch))[""]) == 6
    found = task.training_step(model, dict(batch)).loss[""]
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=0)
    assert task.prediction_step(model, dict(batch)).shape == (3, 4, 512)
