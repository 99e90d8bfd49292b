"""A checkpoint that loads safely may be anything: it is held against what a run writes."""

import copy
import re
from pathlib import Path

import pytest
import torch

from scripts.runs.resume import saved_config
from toys import CLASSES, points, trainer_of
from trainer import snapshot
from trainer.checkpoints import reader
from trainer.checkpoints.reader import check_payload, compare_names
from trainer.errors import CheckpointError
from trainer.tasks.classification import Classification

PATH = Path("x.pt")
PARTS = ("model", "optimizer", "lr_scheduler", "scaler", "ema", "callbacks", "state", "rng")
BOMB = "a0: &a0 [x, x]\n" + "".join(f"a{i}: &a{i} [*a{i - 1}, *a{i - 1}]\n" for i in range(1, 60))


def make_trainer():
    return trainer_of(Classification(CLASSES), points(), max_epochs=1)


@pytest.fixture(scope="module")
def whole():
    trainer = make_trainer()
    trainer.fit()
    return snapshot.take(trainer)


@pytest.fixture
def payload(whole):
    return copy.deepcopy(whole)


def put(payload, path, value):
    *parents, last = path.split("/")
    for name in parents:
        payload = payload[int(name) if name.isdigit() else name]
    payload[last] = value


@pytest.mark.parametrize(
    ("saved", "model", "message"),
    [
        pytest.param(
            {}, {"b": torch.ones(1)}, "b is missing in it, float32[1] in the model", id="lacks"
        ),
        pytest.param(
            {"b": torch.ones(1)}, {}, "b is float32[1] in it, missing in the model", id="extra"
        ),
        pytest.param(
            {"a": torch.ones(2), "w": torch.ones(10, 4), "b": torch.ones(10)},
            {"a": torch.ones(2), "w": torch.ones(5, 4), "b": torch.ones(5)},
            "w is float32[10, 4] in it, float32[5, 4] in the model (+1 more)",
            id="shapes",
        ),
        pytest.param(
            {"w": torch.ones(1).double()},
            {"w": torch.ones(1)},
            "w is float64[1] in it, float32[1] in the model",
            id="type",
        ),
    ],
)
def test_the_first_misfit_is_named_and_the_others_counted(saved, model, message):
    with pytest.raises(
        CheckpointError, match=re.escape(f"x.pt: does not fit the model: {message}")
    ):
        compare_names({"model": saved}, model, PATH)
    compare_names({"model": saved}, saved)


@pytest.mark.parametrize("key", [*PARTS, "config"])
def test_a_part_that_is_missing_or_of_another_type_is_named(payload, key):
    misfit = rf"^x\.pt: [^\n]*\b{key} is (missing|no)[^\n]*$"
    lacking = {name: value for name, value in payload.items() if name != key}
    for spoilt in (lacking, {**payload, key: None}, {**payload, key: 7}):
        with pytest.raises(CheckpointError, match=misfit):
            check_payload(spoilt, PATH)


ENDLESS: list[object] = []
ENDLESS.append(ENDLESS)


@pytest.mark.parametrize(
    ("path", "value", "text"),
    [
        pytest.param("state/counters/global_step", -1, "no count but -1", id="negative"),
        pytest.param("state/counters/position", "1" * 999, "no count", id="text"),
        pytest.param("optimizer/x", torch.zeros(1).expand(10**12), "larger than what", id="huge"),
        pytest.param("callbacks/x", ENDLESS, "expands to more", id="endless"),
    ],
)
def test_a_value_that_no_run_writes_is_named(payload, monkeypatch, path, value, text):
    monkeypatch.setattr(reader, "_MOST_VALUES", 10_000)
    put(payload, path, value)
    with pytest.raises(CheckpointError, match=rf"^x\.pt: [^\n]*{re.escape(text)}[^\n]*$"):
        check_payload(payload, PATH)


def test_a_hostile_configuration_is_refused():
    tag = "a: !!python/object/apply:os.system ['true']\n"
    for text in (BOMB, tag, "a: &a [*a]\n", "- 1\n", "x" * 1_000_001):
        with pytest.raises(CheckpointError, match=r"^x\.pt: [^\n]*configuration[^\n]*$"):
            saved_config({"config": text}, PATH)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        *(("optimizer", {}), ("lr_scheduler/tracks", 3), ("model/0.weight", 3), ("rng", [5])),
        *(("rng/0/python", 3), ("rng/0/torch", 3), ("state/sums/0/sums", 3)),
    ],
)
def test_a_state_that_does_not_fit_is_one_line(payload, path, value):
    put(payload, path, value)
    with pytest.raises(CheckpointError, match=r"^[^\n]+$"):
        snapshot.restore(make_trainer(), payload)


def test_what_a_run_writes_fits_and_another_number_of_threads_is_said(payload):
    check_payload(payload, PATH)
    assert snapshot.restore(make_trainer(), payload) == []
    before = torch.get_num_threads()
    torch.set_num_threads(before + 1)
    try:
        (note,) = snapshot.restore(make_trainer(), payload)
    finally:
        torch.set_num_threads(before)
    assert note.startswith(f"threads: saved with {before}, goes on with {before + 1}")
