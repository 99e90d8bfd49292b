"""A checkpoint that loads safely may be anything: it is held against what a run writes."""

import copy
import io
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from scripts.runs.resume import saved_config
from trainer import snapshot
from trainer.checkpoints.reader import check_payload, read_checkpoint, taking_over
from trainer.errors import CheckpointError
from trainer.options import TrainerOptions
from trainer.strategies.strategy import Strategy
from trainer.tasks.classification import Classification
from trainer.trainer import Trainer

PATH = Path("x.pt")
BOMB = "a0: &a0 [x, x]\n" + "".join(f"a{i}: &a{i} [*a{i - 1}, *a{i - 1}]\n" for i in range(1, 60))


def make_trainer() -> Trainer:
    torch.manual_seed(0)
    model = nn.Linear(4, 3)
    batch = (torch.randn(6, 4), torch.tensor([0, 1, 2, 0, 1, 2]))
    return Trainer(
        model,
        Classification(3),
        torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
        [batch],
        strategy=Strategy("cpu"),
        options=TrainerOptions(max_epochs=1),
    )


@pytest.fixture(scope="module")
def whole() -> bytes:
    trainer = make_trainer()
    trainer.fit()
    file = io.BytesIO()
    torch.save(snapshot.take(trainer), file)
    return file.getvalue()


@pytest.fixture
def payload(whole: bytes) -> dict[str, Any]:
    loaded: dict[str, Any] = torch.load(io.BytesIO(whole), weights_only=True)
    return loaded


def test_what_a_run_writes_fits(payload: dict[str, Any]) -> None:
    check_payload(payload, PATH)
    assert snapshot.restore(make_trainer(), payload) == []


@pytest.mark.parametrize(
    "key",
    ["model", "optimizer", "lr_scheduler", "scaler", "ema", "callbacks", "state", "rng", "config"],
)
@pytest.mark.parametrize(
    "value", [pytest.param(None, id="null"), pytest.param(7, id="number"), "absent"]
)
def test_a_part_that_is_missing_or_of_another_type_is_named(
    payload: dict[str, Any], key: str, value: Any
) -> None:
    payload[key] = value
    if value == "absent":
        del payload[key]
    with pytest.raises(CheckpointError, match=rf"^x\.pt: [^\n]*\b{key} is (missing|no)[^\n]*$"):
        check_payload(payload, PATH)


def _doubled(depth: int) -> list[Any]:
    value: list[Any] = [0]
    for _ in range(depth):
        value = [value, value]
    return value


def _endless() -> list[Any]:
    value: list[Any] = []
    value.append(value)
    return value


@pytest.mark.parametrize(
    ("path", "value", "text"),
    [
        pytest.param("state.counters.global_step", -1, "no count but -1", id="negative"),
        pytest.param("state.counters.epoch", 1.0, "no count but 1.0", id="float"),
        pytest.param("state.counters.samples", True, "no count but True", id="bool"),
        pytest.param("state.counters.position", "1" * 999, "no count", id="text"),
        pytest.param("state.world_size", 0, "each of 0 processes", id="no-process"),
        pytest.param("state.world_size", 3, "each of 3 processes", id="other-number-of-processes"),
        pytest.param("state.sums", [], "sums is no list of a dict", id="no-sums"),
        pytest.param("rng", [5], "rng is no list of a dict", id="rng"),
        pytest.param("model.weight", 3, "model.weight is no tensor", id="number-for-tensor"),
        pytest.param("optimizer.x", torch.zeros(1).expand(10**12), "larger than what", id="huge"),
        pytest.param("optimizer.x", _doubled(70), "expands to more", id="doubled"),
        pytest.param("callbacks.x", _endless(), "expands to more", id="endless"),
    ],
)
def test_a_value_that_no_run_writes_is_named(
    payload: dict[str, Any], path: str, value: Any, text: str
) -> None:
    *parents, last = path.split(".")
    holder: Any = payload
    for name in parents:
        holder = holder[int(name) if isinstance(holder, list) else name]
    holder[last] = value
    with pytest.raises(CheckpointError) as caught:
        check_payload(payload, PATH)
    assert text in str(caught.value)
    assert "\n" not in str(caught.value)
    assert caught.value.exit_code == 4


@pytest.mark.parametrize(
    "text",
    [
        pytest.param(BOMB, id="aliases-that-multiply"),
        pytest.param("a: !!python/object/apply:os.system ['true']\n", id="python-tag"),
        pytest.param("a: &a [*a]\n", id="alias-within-itself"),
        pytest.param("[" * 5000, id="nesting"),
        pytest.param("a: [\n", id="broken"),
        pytest.param("- 1\n", id="a-list"),
        pytest.param("x" * 1_000_001, id="long"),
    ],
)
def test_a_hostile_configuration_is_refused(text: str) -> None:
    with pytest.raises(CheckpointError, match=r"^x\.pt: [^\n]*configuration[^\n]*$"):
        saved_config({"config": text}, PATH)


def test_a_configuration_is_read() -> None:
    assert saved_config({"config": "seed: 1\nname: é\n"}, PATH) == {"seed": 1, "name": "é"}
    assert saved_config({"config": ""}, PATH) == {}


def test_weights_of_another_type_are_refused(payload: dict[str, Any]) -> None:
    payload["model"] = {name: value.double() for name, value in payload["model"].items()}
    with pytest.raises(CheckpointError, match=r"weight is torch.float64 in it, torch.float32 in"):
        snapshot.restore(make_trainer(), payload)


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(lambda p: p["optimizer"].clear(), id="optimizer"),
        pytest.param(lambda p: p["lr_scheduler"].update(tracks=3), id="schedule"),
        pytest.param(lambda p: p["rng"][0]["python"].clear(), id="generators"),
        pytest.param(lambda p: p["rng"][0].update(torch=torch.zeros(3)), id="generator"),
        pytest.param(lambda p: p["state"]["sums"][0].update(sums={"loss": None}), id="sums"),
    ],
)
def test_a_state_that_does_not_fit_is_one_line(
    payload: dict[str, Any], change: Callable[[dict[str, Any]], None]
) -> None:
    changed = copy.deepcopy(payload)
    change(changed)
    with pytest.raises(CheckpointError) as caught:
        snapshot.restore(make_trainer(), changed)
    assert "\n" not in str(caught.value)


def test_another_number_of_threads_is_said(payload: dict[str, Any]) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(before + 1)
    try:
        (note,) = snapshot.restore(make_trainer(), payload)
    finally:
        torch.set_num_threads(before)
    assert note.startswith(f"threads: saved with {before}, goes on with {before + 1}")


def test_errors_with_a_meaning_of_their_own_pass() -> None:
    with pytest.raises(torch.OutOfMemoryError), taking_over("the state"):
        raise torch.OutOfMemoryError("full")


def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.pt")
    with pytest.raises(CheckpointError, match="not a file"):
        read_checkpoint(tmp_path / "pipe.pt")
    with pytest.raises(CheckpointError, match="not a file"):
        read_checkpoint(tmp_path)
