"""Packing: a function of the lengths, and a row's documents know nothing of each other (L2)."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from regimen.data.packing import PackedDocuments, TokenizedText, first_fit_decreasing


def by_hand(lengths, size):
    """First fit, descending, by looking at every row."""
    rows = []
    for number in sorted(range(len(lengths)), key=lambda n: (-lengths[n], n)):
        for row in rows:
            if sum(lengths[n] for n in row) + lengths[number] <= size:
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
    return [TokenizedText(random.integers(1, 512, size=n), random.random(n) < 0.6) for n in lengths]


def test_a_document_longer_than_a_row_is_refused():
    with pytest.raises(ValueError, match="a document of 5 tokens is longer than a row of 4"):
        first_fit_decreasing([5, 3], 4)


@pytest.mark.parametrize("pack", [True, False])
def test_a_row_holds_whole_documents_and_nothing_else(pack):
    given = documents([3, 9, 5, 2, 7, 4])
    data = PackedDocuments(given, 10, pack)
    assert len(data) == (4 if pack else 6)
    found = []
    for index in range(len(data)):
        row = {name: tensor.numpy() for name, tensor in data[index].items()}
        assert {tensor.shape for tensor in row.values()} == {(10,)}
        begin = 0
        for number in data.rows[index]:
            tokens, is_learnt = given[number]
            own = slice(begin, begin + len(tokens))
            begin = own.stop
            found.append(number)
            assert np.array_equal(row["input_ids"][own], tokens)
            assert np.array_equal(row["position_ids"][own], np.arange(len(tokens)))
            # What precedes a document's first token is another document.
            assert row["labels"][own][0] == -100
            expected = np.where(is_learnt, tokens, -100)
            assert np.array_equal(row["labels"][own][1:], expected[1:])
        assert not row["position_ids"][begin:].any()
        assert (row["labels"][begin:] == -100).all()
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


def llama(kind):
    transformers = pytest.importorskip("transformers", reason="the extra transformers is missing")
    from regimen.models.transformers_adapter import Logits

    torch.manual_seed(0)
    sizes = {"vocab_size": 512, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    if kind == "gpt2":
        sizes = {"vocab_size": 512, "n_embd": 32, "n_layer": 2, "n_head": 2}
    config = transformers.AutoConfig.for_model(kind, **sizes)
    if kind != "gpt2":
        config.num_key_value_heads = 1
        config.intermediate_size = 64
    config.attn_pdrop = config.embd_pdrop = config.resid_pdrop = 0.0
    return Logits(transformers.AutoModelForCausalLM.from_config(config)).double()


@pytest.mark.parametrize("kind", ["llama", "qwen2", "gpt2"])
def test_packed_and_one_by_one_are_the_same_loss_and_gradients(kind):
    from regimen.trainer.tasks.chat import Chat

    model = llama(kind)
    task = Chat()
    given = documents([3, 9, 5, 2, 7, 4, 11, 6])
    results = []
    for pack in (True, False):
        data = PackedDocuments(given, 16, pack)
        rows = [data[index] for index in range(len(data))]
        batch = {name: torch.stack([row[name] for row in rows]) for name in rows[0]}
        output = task.training_step(model, batch)
        loss = output.loss[""]
        gradients = torch.autograd.grad(loss, list(model.parameters()), allow_unused=True)
        results.append([loss.detach(), *(g for g in gradients if g is not None)])
    # A third time with each document alone, without rows, positions and padding.
    total = sum(int(document.is_learnt[1:].sum()) for document in given)
    loss = 0
    for tokens, is_learnt in given:
        logits = model.model(input_ids=torch.from_numpy(tokens)[None]).logits[0, :-1]
        labels = torch.from_numpy(np.where(is_learnt, tokens, -100))[1:]
        losses = torch.nn.functional.cross_entropy(logits, labels, reduction="sum")
        loss = loss + losses / total
    gradients = torch.autograd.grad(loss, list(model.parameters()), allow_unused=True)
    results.append([loss.detach(), *(g for g in gradients if g is not None)])
    for packed, alone, by_hand in zip(*results, strict=True):
        torch.testing.assert_close(packed, by_hand, rtol=1e-13, atol=1e-14)
        torch.testing.assert_close(alone, by_hand, rtol=1e-13, atol=1e-14)
