"""Packing: a function of the lengths, and a row's documents know nothing of each other (L2)."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from regimen.data.packing import PackedDocuments, TokenizedText, first_fit_decreasing


def by_hand(lengths, size):
    """First fit, descending, by looking at every row."""
    longest_first = sorted(range(len(lengths)), key=lambda number: (-lengths[number], number))
    rows = []
    for number in longest_first:
        for row in rows:
            used = sum(lengths[other] for other in row)
            if used + lengths[number] <= size:
                row.append(number)
                break
        else:
            rows.append([number])
    return rows


@given(st.lists(st.integers(1, 20), max_size=60), st.integers(20, 40))
def test_rows_are_those_of_first_fit_decreasing(lengths, size):
    assert first_fit_decreasing(lengths, size) == by_hand(lengths, size)


def documents(lengths, seed=0):
    random = np.random.default_rng(seed)
    found = []
    for length in lengths:
        tokens = random.integers(1, 512, size=length)
        is_learnt = random.random(length) < 0.6
        found.append(TokenizedText(tokens, is_learnt))
    return found


def test_a_document_longer_than_a_row_is_refused():
    with pytest.raises(ValueError, match="a document of 5 tokens is longer than a row of 4"):
        first_fit_decreasing([5, 3], 4)


@pytest.mark.parametrize(("pack", "rows"), [(True, 4), (False, 6)])
def test_a_row_holds_whole_documents_and_nothing_else(pack, rows):
    given = documents([3, 9, 5, 2, 7, 4])

    data = PackedDocuments(given, 10, pack)

    assert len(data) == rows
    found = []
    for index in range(len(data)):
        row = {name: tensor.numpy() for name, tensor in data[index].items()}
        assert {values.shape for values in row.values()} == {(10,)}
        begin = 0
        for number in data.rows[index]:
            tokens, is_learnt = given[number]
            end = begin + len(tokens)
            labels = row["labels"][begin:end]
            expected_labels = np.where(is_learnt, tokens, -100)
            assert np.array_equal(row["input_ids"][begin:end], tokens)
            assert np.array_equal(row["position_ids"][begin:end], np.arange(len(tokens)))
            # What precedes a document's first token is another document.
            assert labels[0] == -100
            assert np.array_equal(labels[1:], expected_labels[1:])
            found.append(number)
            begin = end
        padding = slice(begin, None)
        assert not row["position_ids"][padding].any()
        assert (row["labels"][padding] == -100).all()
    assert sorted(found) == list(range(6))


def test_the_fingerprint_follows_tokens_labels_and_rows():
    lengths = [3, 9, 5]
    given = documents(lengths)
    base = PackedDocuments(given, 10).fingerprint()
    assert PackedDocuments(documents(lengths), 10).fingerprint() == base
    assert PackedDocuments(given, 12).fingerprint() != base
    assert PackedDocuments(given, 10, pack=False).fingerprint() != base
    assert PackedDocuments(documents(lengths, seed=1), 10).fingerprint() != base
    given[1].is_learnt[1] ^= True
    assert PackedDocuments(given, 10).fingerprint() != base


TINY = {"vocab_size": 512, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
TINY_LLAMA = {**TINY, "num_key_value_heads": 1, "intermediate_size": 64}


CONFIGS = {
    "llama": TINY_LLAMA,
    "qwen2": TINY_LLAMA,
    "gpt2": {"vocab_size": 512, "n_embd": 32, "n_layer": 2, "n_head": 2},
}


def language_model(kind):
    transformers = pytest.importorskip("transformers", reason="the extra transformers is missing")
    from regimen.models.transformers_adapter import Logits

    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(kind, **CONFIGS[kind])
    config.attn_pdrop = config.embd_pdrop = config.resid_pdrop = 0.0
    model = transformers.AutoModelForCausalLM.from_config(config)
    return Logits(model).double()


def loss_and_gradients(model, loss):
    """Return the loss, and the gradients of the parameters that it depends on."""
    gradients = torch.autograd.grad(loss, list(model.parameters()), allow_unused=True)
    return [loss.detach(), *[gradient for gradient in gradients if gradient is not None]]


def of_rows(model, data):
    """Return loss and gradients of all rows in one batch, as the task computes them."""
    from regimen.trainer.tasks.chat import Chat

    rows = [data[index] for index in range(len(data))]
    batch = {name: torch.stack([row[name] for row in rows]) for name in rows[0]}
    output = Chat().training_step(model, batch)
    return loss_and_gradients(model, output.loss[""])


def of_single_documents(model, given):
    """Return them of each document alone, without rows, positions and padding."""
    learnt = sum(int(document.is_learnt[1:].sum()) for document in given)
    total = 0
    for tokens, is_learnt in given:
        inputs = torch.from_numpy(tokens)[None]
        logits = model.model(input_ids=inputs).logits[0, :-1]
        labels = torch.from_numpy(np.where(is_learnt, tokens, -100))[1:]
        total = total + torch.nn.functional.cross_entropy(logits, labels, reduction="sum")
    return loss_and_gradients(model, total / learnt)


@pytest.mark.parametrize("pack", [True, False])
@pytest.mark.parametrize("kind", ["llama", "qwen2", "gpt2"])
def test_rows_have_the_loss_and_gradients_of_their_documents_alone(kind, pack):
    model = language_model(kind)
    given = documents([3, 9, 5, 2, 7, 4, 11, 6])

    found = of_rows(model, PackedDocuments(given, 16, pack))

    expected = of_single_documents(model, given)
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-13, atol=1e-14)
