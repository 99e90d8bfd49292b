"""A model that lets the documents of a row see each other, or what it is to predict, is refused."""

import numpy as np
import pytest
import torch

pytest.importorskip("transformers", reason="the extra transformers is not installed")

from regimen.data.formats.texts import texts
from regimen.data.mixture import Mixture
from regimen.data.packing import PackedDocuments, TokenizedText
from regimen.models.transformers_adapter import build
from regimen.trainer.assembly.experiment import build as build_experiment
from regimen.trainer.errors import ModelError
from regimen.trainer.tasks.chat import Chat
from regimen.trainer.tasks.classification import Classification
from toy_chat import conversations, make_tokenizer, write_rows
from toys import composed

CONTEXT = 32
# Two layers of 16 to 48 numbers, in the words of each configuration.
SMALL = {
    "llama": {"intermediate_size": 32, "num_key_value_heads": 2},
    "gpt2": {"n_embd": 16, "n_layer": 2, "n_head": 4},
    "opt": {"ffn_dim": 32, "word_embed_proj_dim": 16},
    "bloom": {"n_layer": 2, "n_head": 4},
    "bert": {"intermediate_size": 32},
}


def network(kind, **options):
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, **SMALL[kind]}
    return build(kind, 64, "AutoModelForCausalLM", config={**sizes, **options})


def documents(pack=True, lengths=(12, 9, 20, 2)):
    draw = np.random.default_rng(0)
    texts = [TokenizedText(draw.integers(3, 64, size), np.ones(size, bool)) for size in lengths]
    return PackedDocuments(texts, CONTEXT, pack)


def alone(model, dataset):
    """Return how far the logits of a document in a row are from those of the document alone."""
    largest = 0.0
    for index, row in enumerate(dataset.rows):
        sample = dataset[index]
        inputs = {name: sample[name][None] for name in ("input_ids", "position_ids")}
        together = model(**inputs)[0]
        begin = 0
        for number in row:
            tokens = torch.from_numpy(dataset._tokens[dataset._starts[number] :])
            own = tokens[: dataset._starts[number + 1] - dataset._starts[number]]
            logits = model(input_ids=own[None])[0]
            difference = together[begin : begin + len(own)] - logits
            largest = max(largest, difference.abs().max().item())
            begin += len(own)
    return largest


@pytest.mark.parametrize("kind", ["llama", "gpt2", "opt", "bloom"])
def test_rows_are_packed_only_if_a_document_is_computed_as_if_alone(kind):
    model = network(kind).eval()
    packed = documents()
    with torch.no_grad():
        is_apart = alone(model, packed) < 1e-5

    Chat().check_training(model, documents(pack=False))
    if is_apart:
        Chat().check_training(model, packed)
    else:
        with pytest.raises(ModelError, match=r"data.pack: is true, and .* set data.pack=false"):
            Chat().check_training(model, packed)

    assert is_apart == (kind in ("llama", "gpt2"))


@pytest.mark.parametrize("pack", [True, False])
def test_a_model_that_sees_what_it_is_to_predict_is_refused(pack):
    with pytest.raises(ModelError, match=r"model: .*BertLMHeadModel .* it sees the token"):
        Chat().check_training(network("bert"), documents(pack))
    Chat().check_training(network("bert", is_decoder=True), documents(pack=False))


def test_each_set_of_a_mixture_is_looked_at():
    sets = {"one": documents(pack=False), "other": documents()}
    with pytest.raises(ModelError, match=r"data.pack"):
        Chat().check_training(network("opt"), Mixture(sets, {"one": 1, "other": 1}))


def test_the_trial_changes_no_mode_and_does_not_judge_a_model_that_fails():
    model = network("llama").train()
    model.model.model.layers[0].eval()
    modes = [module.training for module in model.modules()]

    Chat().check_training(model, documents())

    assert [module.training for module in model.modules()] == modes
    Chat().check_training(torch.nn.Linear(2, 2), documents())


def classifier(kind, auto, **options):
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, **SMALL[kind]}
    return build(kind, 2, auto, config={**sizes, "vocab_size": 512, **options})


def labelled(folder):
    made = make_tokenizer()
    made.pad_token = "<|im_end|>"
    made.save_pretrained(folder / "words")
    rows = [{"text": "tea " * (3 + number), "label": number % 2} for number in range(4)]
    path = write_rows(folder / "train.jsonl", rows)
    data = texts(str(path), "train", "text", str(folder / "words"), length=24, val_fraction=0)
    return data, made.pad_token_id


@pytest.mark.parametrize("kind", ["llama", "gpt2", "bert"])
def test_a_classifier_that_sees_empty_places_is_refused(kind, tmp_path):
    data, padding = labelled(tmp_path)
    task = Classification(2)
    by_last_token = kind != "bert"
    name = "AutoModelForSequenceClassification"

    task.check_training(classifier(kind, name, pad_token_id=padding), data)
    for other in (None, 7):
        model = classifier(kind, name, pad_token_id=other)
        if by_last_token:
            with pytest.raises(ModelError, match=r"empty places behind it: .* pad_token_id in its"):
                task.check_training(model, data)
        else:
            task.check_training(model, data)

    tagger = classifier(kind, "AutoModelForTokenClassification", pad_token_id=7)
    Classification(2).check_training(tagger, data)


def test_a_run_is_refused_before_it_starts(tmp_path):
    write_rows(tmp_path / "data/train.jsonl", conversations(12))
    make_tokenizer().save_pretrained(tmp_path / "words")
    words = [
        "experiment=chat",
        "model=transformers",
        "model.name=opt",
        "model.config={hidden_size: 16, num_hidden_layers: 1, num_attention_heads: 2, ffn_dim: 16, "
        "word_embed_proj_dim: 16, max_position_embeddings: 128}",
        f"data.tokenizer={tmp_path / 'words'}",
        f"data.root={tmp_path / 'data'}",
        "data.context=128",
        "loader.batch_size=2",
    ]

    with pytest.raises(ModelError, match=r"OPTForCausalLM lets the conversations of a row"):
        build_experiment(composed(*words))
