"""Models of the package transformers; built from values or a folder, nothing is downloaded."""

from pathlib import Path

import pytest
import torch

from models.errors import NetworkError
from models.transformers_adapter import build

transformers = pytest.importorskip("transformers", reason="the extra transformers is not installed")
TINY = {
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 16,
    "vocab_size": 50,
}


def test_logits_are_those_of_transformers() -> None:
    model = build("bert", 3, config=TINY).eval()
    tokens = torch.arange(10).view(2, 5)
    mask = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 0, 0, 0]])
    found = model({"input_ids": tokens, "attention_mask": mask})
    assert torch.equal(found, model.model(input_ids=tokens, attention_mask=mask).logits)
    assert found.shape == (2, 3)
    assert model(tokens).shape == (2, 3)


def test_a_language_model_has_the_vocabulary_as_its_classes() -> None:
    tiny = {"n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 8}
    model = build("gpt2", 50, auto="AutoModelForCausalLM", config=tiny)
    assert model(torch.zeros(2, 8, dtype=torch.long)).shape == (2, 8, 50)


def test_a_folder_gives_its_weights_and_a_new_head(tmp_path: Path) -> None:
    model = build("bert", 3, config=TINY)
    model.model.save_pretrained(tmp_path)
    same, other = build(str(tmp_path), 3), build(str(tmp_path), 5)
    weights = model.state_dict()
    assert all(torch.equal(value, weights[name]) for name, value in same.state_dict().items())
    name = "model.bert.embeddings.word_embeddings.weight"
    assert torch.equal(other.state_dict()[name], weights[name])
    assert other(torch.zeros(2, 4, dtype=torch.long)).shape == (2, 5)


def test_mistakes_are_named(tmp_path: Path) -> None:
    with pytest.raises(NetworkError, match=r"model\.auto: transformers has no 'AutoModel'"):
        build("bert", 3, auto="AutoModel", config=TINY)
    with pytest.raises(NetworkError, match=r"model\.name=bertt"):
        build("bertt", 3, config=TINY)
    with pytest.raises(NetworkError, match=r"model\.name="):
        build(str(tmp_path / "absent" / "folder"), 3)
