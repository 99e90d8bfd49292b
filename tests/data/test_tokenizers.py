"""What names a model or a tokenizer: a folder, or a name that a hub or its cache has."""

import pytest

pytest.importorskip("transformers", reason="the extra transformers is not installed")

import huggingface_hub
from huggingface_hub.errors import FileMetadataError

from regimen.conf.errors import ConfigError
from regimen.data.tokenizers import load_tokenizer, require_available
from regimen.models.transformers_adapter import build


class NoAnswerError(Exception):
    """Stands for what a client raises: httpx or httpx2, as huggingface_hub has it."""


@pytest.fixture
def hub(monkeypatch):
    """A hub; `answer` is what it raises. Returns what it was asked."""
    asked = []

    def ask(url, **_):
        asked.append(url)
        raise ask.answer

    ask.answer = NoAnswerError("Name or service not known")
    ask.asked = asked
    monkeypatch.setattr(huggingface_hub, "get_hf_file_metadata", ask)
    return ask


@pytest.mark.parametrize(
    ("key", "load"),
    [
        ("model.name", lambda: build("nowhere", 2)),
        ("data.tokenizer", lambda: load_tokenizer("nowhere")),
    ],
)
def test_a_hub_that_does_not_answer_is_asked_once(hub, key, load):
    with pytest.raises(ConfigError, match="there is no folder nowhere, and the hub does") as caught:
        load()

    assert caught.value.problems[0].key == key
    assert "HF_HUB_OFFLINE=1" in str(caught.value)
    assert len(hub.asked) == 1


@pytest.mark.parametrize("name", ["./nowhere", "a/b/c", "~/nowhere", "/nowhere/at/all", "a b"])
def test_what_is_no_name_of_the_hub_is_not_asked_for(hub, name):
    with pytest.raises(ConfigError, match=r"there is no folder .*which is no name of the hub"):
        require_available("model.name", name)
    assert hub.asked == []


def test_what_a_hub_answers_is_told_by_transformers(hub):
    hub.answer = FileMetadataError("no such repository")
    require_available("model.name", "nowhere")
    assert len(hub.asked) == 1


def test_folders_and_the_cache_need_no_hub(hub, tmp_path, monkeypatch):
    require_available("model.name", str(tmp_path))
    monkeypatch.setattr(huggingface_hub, "try_to_load_from_cache", lambda *_: "config.json")
    require_available("model.name", "gpt2")
    assert hub.asked == []
