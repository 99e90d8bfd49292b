"""`${data.train.NAME}`: what only the open training set knows, in the arguments of the others."""

import textwrap
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml

from regimen.conf.check import parse
from regimen.conf.errors import ConfigError
from regimen.conf.yaml_file import dump
from regimen.scripts.composition.compose import compose
from regimen.trainer.assembly.check import check_targets
from regimen.trainer.assembly.data import _plain
from regimen.trainer.assembly.experiment import build, build_evaluator
from regimen.trainer.inference.predictor import (
    inference_metadata,
    read_inference_metadata,
    with_attributes_of,
)
from regimen.trainer.strategies.strategy import Strategy

CODE = """
import numpy as np
import torch
from torch import nn

class Words:
    _opened = []

    def __init__(self, split, context=4):
        Words._opened.append(split)
        generator = torch.Generator().manual_seed(len(split))
        self.tokens = torch.randint(0, 11, (9, context + 1), generator=generator)
        self.vocabulary = np.int64(11)
        self.names = ("a", "b")
        self.cache = object()

    @property
    def broken(self):
        raise RuntimeError("not yet")

    def __len__(self):
        return len(self.tokens)

    def __getitem__(self, index):
        return self.tokens[index, :-1], self.tokens[index, 1:]

class Net(nn.Module):
    def __init__(self, vocabulary: int, names: list, text: str = ""):
        super().__init__()
        assert type(vocabulary) is int and list(names) == ["a", "b"]
        self.embedding = nn.Embedding(vocabulary, 6)
        self.head = nn.Linear(6, vocabulary)
        self.text = text

    def forward(self, x):
        return self.head(self.embedding(x))
"""
EXPERIMENT = """
# @package _global_
defaults:
  - override /transforms: none
  - override /task: language_model
name: words
data:
  num_classes: 11
  train: {_target_: attributes_mine.Words, split: train}
  val: {_target_: attributes_mine.Words, split: val}
  test: {_target_: attributes_mine.Words, split: test}
model:
  _target_: attributes_mine.Net
  vocabulary: ${data.train.vocabulary}
  names: ${data.train.names}
  text: of ${data.train.vocabulary}
"""


ALLOWED = ["--allow-target", "attributes_mine"]  # which the folder of the first test stays


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "attributes_mine.py").write_text(CODE)
    experiment = tmp_path / "conf" / "experiment" / "words.yaml"
    experiment.parent.mkdir(parents=True)
    experiment.write_text(textwrap.dedent(EXPERIMENT).lstrip())
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


def composed(folder: Path, *overrides: str) -> dict[str, Any]:
    line = [*ALLOWED, "--config-dir", str(folder / "conf"), "experiment=words", *overrides]
    return compose(line).config


def test_a_model_takes_what_the_training_set_offers(folder: Path) -> None:
    config = composed(folder)
    experiment = build(config)
    assert experiment.trainer.model.embedding.num_embeddings == 11
    assert experiment.trainer.model.text == "of 11"

    # The checks have no data to ask, and what is stored can be read again.
    check_targets(parse(config))
    text = dump(config)
    assert yaml.safe_load(text)["model"]["vocabulary"] == "${data.train.vocabulary}"

    (folder / "again.yaml").write_text(text)
    again = compose([*ALLOWED, "--config-dir", str(folder), "--config-name", "again"]).config
    assert again["model"] == config["model"]


def test_an_evaluation_reads_no_training_data(folder: Path) -> None:
    config = composed(folder)
    experiment = build(config)
    task = experiment.trainer.task
    inference_metadata(experiment.config, experiment.data, task).write(folder)
    stored = read_inference_metadata(folder)

    assert stored.attributes["data.train.vocabulary"] == 11
    assert stored.model["vocabulary"] == 11

    import attributes_mine  # type: ignore[import-not-found]

    attributes_mine.Words._opened.clear()
    filled = with_attributes_of(folder, parse(config))
    components = build_evaluator(filled, 11, Strategy("cpu"))

    assert components.model.embedding.num_embeddings == 11
    assert attributes_mine.Words._opened == []

    (folder / "inference.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"model.names: .* is not known: training stores"):
        with_attributes_of(folder, parse(config))


@pytest.mark.parametrize(
    ("override", "message"),
    [
        pytest.param(
            "model.vocabulary=${data.train.vocabulry}",
            r"model\.vocabulary: Words, .* called 'vocabulry'.*\$\{data\.train\.names\}, "
            r"\$\{data\.train\.vocabulary\}",
            id="missing",
        ),
        pytest.param("model.text=${data.train.cache}", r"model\.text: .* it is a obj", id="object"),
    ],
)
def test_what_the_set_does_not_offer_is_told_with_what_it_does(
    folder: Path, override: str, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        build(composed(folder, override))


@pytest.mark.parametrize(
    ("override", "message"),
    [
        pytest.param("name=${data.train.vocabulary}", "name: asks for an attribute", id="name"),
        pytest.param(
            "trainer.max_epochs=${data.train.vocabulary}", "trainer.max_epochs: ", id="trainer"
        ),
        pytest.param("data.val.context=${data.train.vocabulary}", "refers to nothing", id="data"),
        pytest.param("model.text=${data.val.vocabulary}", "refers to nothing", id="validation"),
        pytest.param("model.vocabulry=3", "no such argument|vocabulry", id="a typo beside it"),
    ],
)
def test_where_it_cannot_stand_and_other_mistakes_are_found_before_data_are_read(
    folder: Path, override: str, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        check_targets(parse(composed(folder, override)))


def test_an_argument_of_the_set_is_an_ordinary_reference(folder: Path) -> None:
    assert composed(folder, "model.text=${data.train.split}")["model"]["text"] == "train"


@pytest.mark.parametrize(
    ("value", "plain"),
    [(np.float32(0.5), 0.5), (torch.tensor(3), 3), ((1, (True, "a")), [1, [True, "a"]])],
    ids=["numpy", "tensor", "nested"],
)
def test_numbers_become_pythons_own(value: Any, plain: Any) -> None:
    assert _plain(value) == plain
    assert type(_plain(value)) is type(plain)


@pytest.mark.parametrize(
    "value", [None, {"a": 1}, [object()], np.ones(2)], ids=["none", "dict", "object", "array"]
)
def test_what_is_not_plain_is_refused(value: Any) -> None:
    with pytest.raises(TypeError, match="it is a"):
        _plain(value)
