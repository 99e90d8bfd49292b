"""Averages and writers of checkpoints are found by their class, under any name."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from callbacks.checkpoint import Checkpoint
from callbacks.ema import EMA
from scripts.runs.report import best_of
from scripts.runs.resume import Moment
from scripts.sweeps.leaderboard import Ranking
from trainer import snapshot
from trainer.assembly.parts import Assembly, Known
from trainer.callback import Average, Callback, Hooks, Saver
from trainer.errors import ModelError
from trainer.strategies.strategy import Strategy
from trainer.update.precision import Precision


class Half(Average):
    """Evaluate with half of the weights that the run ended with."""

    def __init__(self) -> None:
        self.weights: dict[str, Tensor] = {}

    def on_fit_end(self, trainer: Any) -> None:
        self.weights = {n: p.detach().clone() / 2 for n, p in trainer.model.named_parameters()}

    @contextmanager
    def swap(self, trainer: Any) -> Iterator[None]:
        parameters = dict(trainer.model.named_parameters())
        kept = {n: p.detach().clone() for n, p in parameters.items()}
        with torch.no_grad():
            for name, value in self.weights.items():
                parameters[name].copy_(value)
            yield
            for name, value in kept.items():
                parameters[name].copy_(value)

    def state_dict(self) -> dict[str, Any]:
        return {"weights": self.weights}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.weights = dict(state["weights"])


class Keeper(Saver):
    """Write nothing, and know which step was the best."""

    def best_result(self) -> tuple[str, float, int] | None:
        return "val/loss", 0.5, 7

    def state_dict(self) -> dict[str, Any]:
        return {"ranking": [[7, 0.5]]}


def test_an_average_of_ones_own_is_evaluated_saved_and_loaded(make_trainer: Any) -> None:
    trainer = make_trainer({"my_half": Half()})
    trainer.fit()
    payload = snapshot.take(trainer)
    assert payload["ema"]["weights"].keys() == dict(trainer.model.named_parameters()).keys()
    expected = trainer.evaluate(trainer.val_loader, "val")
    for load in (snapshot.load_weights, snapshot.restore):
        fresh = make_trainer({"my_half": Half()})
        load(fresh, payload)
        assert fresh.evaluate(fresh.val_loader, "val") == expected
    without = make_trainer({})
    snapshot.load_weights(without, payload)
    assert without.evaluate(without.val_loader, "val") != expected


def test_two_evaluated_averages_are_refused_by_what_they_are_called(
    make_trainer: Any,
) -> None:
    with pytest.raises(ModelError, match=r"callbacks\.one and callbacks\.two"):
        make_trainer({"one": Half(), "two": EMA(0.9)})
    kept = make_trainer({"one": Half(), "two": EMA(0.9, use_for_evaluation=False)})
    assert kept.average is kept.callbacks["one"]


@pytest.mark.parametrize("name", ["ema", "smooth"])
def test_an_ema_goes_on_under_any_name(name: str, make_trainer: Any) -> None:
    whole, first, second = (make_trainer({name: EMA(0.9)}) for _ in range(3))
    whole.fit()
    first.fit()
    payload = snapshot.take(first)
    snapshot.restore(second, payload)
    ours, theirs = whole.callbacks[name].state_dict(), second.callbacks[name].state_dict()
    for key, value in ours["model"].items():
        assert torch.equal(theirs["model"][key], value)


def test_a_saver_of_ones_own_has_the_role_of_checkpoint(make_trainer: Any) -> None:
    trainer = make_trainer({"keeps": Keeper(), "other": Callback()})
    trainer.fit()
    experiment: Any = SimpleNamespace(trainer=trainer)
    assert best_of(experiment) == ("val/loss", 0.5, 7)
    payload = snapshot.take(trainer)
    assert Moment.of(payload).best == (7,)


def test_checkpoints_are_written_last_under_any_name(make_trainer: Any, tmp_path: Path) -> None:
    nodes: dict[str, Any] = {
        "saves": {"_target_": "callbacks.checkpoint.Checkpoint"},
        "ema": {"_target_": "callbacks.ema.EMA", "decay": 0.5},
    }
    config: Any = SimpleNamespace(callbacks=nodes)
    callbacks = Assembly(config, Known(None), Strategy(), Precision()).callbacks
    assert list(callbacks) == ["ema", "saves"]
    trainer = make_trainer(callbacks, tmp_path)
    trainer.fit()
    saver = callbacks["saves"]
    assert isinstance(saver, Checkpoint)
    assert saver.best is not None
    experiment: Any = SimpleNamespace(trainer=trainer)
    assert best_of(experiment) == (saver.monitor, saver.best.value, saver.best.step)


def test_a_leaderboard_goes_by_the_metric_of_the_best() -> None:
    jobs: Any = [SimpleNamespace(results={"best/val/f1": 0.5, "val/f1": 0.25})]
    config = {"callbacks": {"keeps": {"monitor": "val/f1", "mode": "min"}, "none": None}}
    ranking = Ranking(config, jobs)
    assert (ranking.name, ranking.value(jobs[0]), ranking.rank_of(0.5)) == ("val/f1", 0.5, 0.5)
    assert Ranking(config, []).name == "val/f1"
    assert Ranking({"callbacks": {}}, [], expected="val/accuracy").name == "val/accuracy"
    assert Ranking(config, [], expected="val/accuracy").name == "val/f1"
    assert Ranking({"callbacks": {}}, []).name == "val/loss"


def test_a_hook_with_wrong_parameters_is_found_before_the_run() -> None:
    class Short(Callback):
        def on_epoch_end(self) -> None:  # type: ignore[override]
            pass

    with pytest.raises(ModelError, match=r"Short\.on_epoch_end must take \(self, trainer\)"):
        Hooks([Short()])


def test_a_method_named_nearly_as_a_hook_is_told(caplog: pytest.LogCaptureFixture) -> None:
    class Lightnings(Callback):
        def on_train_epoch_end(self, trainer: Any) -> None:
            pass

        def on_my_own_account(self) -> None:
            pass

    Hooks([Lightnings()])
    (told,) = [record.getMessage() for record in caplog.records]
    assert "Lightnings.on_train_epoch_end is no hook" in told
    assert "did you mean on_" in told
