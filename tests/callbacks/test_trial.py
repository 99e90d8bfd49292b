"""A job of a search reports to its study, and ends if the pruner decides so."""

from types import SimpleNamespace

import pytest
import torch

from regimen.callbacks.trial import PRUNED_AT, PRUNER, Trial, open_storage
from regimen.trainer.callback import Callback
from regimen.trainer.distributed import Group
from regimen.trainer.errors import CheckpointError
from regimen.trainer.state import PRUNED, TrainState
from toys import Log, StopAt

optuna = pytest.importorskip("optuna")
pytestmark = pytest.mark.filterwarnings("ignore::optuna.exceptions.ExperimentalWarning")
ALWAYS = {"name": "asha", "options": {"min_resource": 2, "bootstrap_count": 9}}  # prunes at 2
NEVER = {"name": None, "options": {}}


@pytest.fixture
def study(tmp_path):
    """Return a function that makes a study with one open trial."""

    def make(pruner, metric="val/loss"):
        storage = open_storage(str(tmp_path / "study.journal"))
        found = optuna.create_study(study_name="s", storage=storage)
        found.set_metric_names([metric])
        found.set_user_attr(PRUNER, pruner)
        found.ask()
        return found

    return make


@pytest.fixture
def trial(tmp_path):
    """Return a function that makes the callback of the first trial."""

    def make():
        return Trial(str(tmp_path / "study.journal"), "s", 0)

    return make


def reported(study):
    return study.trials[0].intermediate_values


def trained(make_trainer, callbacks, **options):
    trainer = make_trainer(callbacks, **options)
    trainer.fit()
    return trainer


@pytest.mark.parametrize(
    ("metric", "options", "steps"),
    [
        ("val/loss", {"max_epochs": 3}, [1, 2, 3]),
        ("val/loss", {"validate_every_n_steps": 4, "validate_every_n_epochs": None}, [4, 8, 10]),
        ("train/epoch_loss", {"max_epochs": 3, "validated": False}, [1, 2, 3]),
    ],
    ids=["by-epochs", "by-steps", "of-training"],
)
def test_a_metric_is_reported_once_and_changes_nothing(
    study, trial, make_trainer, carry_over, metric, options, steps
):
    it = study({"name": "median", "options": {}}, metric)
    first = trained(make_trainer, {"trial": trial(), "stop": StopAt(7)}, **options)
    again = make_trainer({"trial": trial(), "stop": StopAt(99)}, **options)
    carry_over(first, again)
    again.fit()
    log = Log()
    plain = trained(make_trainer, {"log": log}, **options)

    assert not again.state.pruned

    values = reported(it)
    assert list(values) == steps
    assert list(values.values()) == list(log.of(metric).values())

    one = plain.state_dict()
    other = again.state_dict()
    assert one["state"] == other["state"]
    assert str(one["rng"]) == str(other["rng"])
    torch.testing.assert_close(one["model"], other["model"], rtol=0, atol=0)


def test_the_pruner_ends_a_run_that_is_not_done(study, trial, make_trainer, tmp_path):
    it = study(ALWAYS)
    trainer = trained(make_trainer, {"trial": trial()}, max_epochs=5)
    assert trainer.state.stop_reason == PRUNED
    assert trainer.state.epoch == 2
    assert trainer.state.pruned
    assert not trainer.state.interrupted
    assert it.trials[0].user_attrs[PRUNED_AT] == 10

    second = Trial(str(tmp_path / "study.journal"), "s", it.ask().number)
    done = trained(make_trainer, {"trial": second}, max_epochs=2)
    assert done.state.stop_reason is None


@pytest.mark.parametrize(
    ("name", "options", "others", "expected"),
    [
        pytest.param("median", {"n_startup_trials": 1}, 0.0, 1, id="median-behind"),
        pytest.param("median", {"n_startup_trials": 1}, 99.0, 4, id="median-ahead"),
        pytest.param("asha", {"min_resource": 1, "reduction_factor": 2}, 0.0, 1, id="asha-behind"),
        pytest.param("asha", {"min_resource": 1, "reduction_factor": 2}, 99.0, 4, id="asha-ahead"),
        pytest.param("hyperband", {"max_resource": 2, "reduction_factor": 3}, 0.0, 1, id="hyperb"),
    ],
)
def test_each_pruner_compares_with_the_other_jobs(
    study, trial, make_trainer, name, options, others, expected
):
    it = study({"name": name, "options": options})
    for _ in range(2):
        other = it.ask()
        for step in range(1, 5):
            other.report(others, step)
            other.storage.set_trial_system_attr(other._trial_id, "completed_rung_0", others)
        it.tell(other, others)
    trainer = trained(make_trainer, {"trial": trial()}, max_epochs=4)
    assert trainer.state.epoch == expected


def test_an_end_that_a_signal_overtook_comes_with_the_resume(
    study, trial, make_trainer, carry_over
):
    class Signal(Callback):
        def on_boundary(self, trainer):
            if trainer.state.stop_request is not None:
                trainer.state.request_stop("SIGTERM", 143)

    it = study(ALWAYS)
    first = make_trainer({"trial": trial(), "stop": Signal()}, max_epochs=5)
    first.fit()

    assert first.state.stop_code == 143
    assert it.trials[0].user_attrs[PRUNED_AT] == 10

    again = make_trainer({"trial": trial(), "stop": Callback()}, max_epochs=5)
    carry_over(first, again)
    again.fit()

    assert again.state.epoch == 2
    assert again.state.pruned


def test_a_replayed_validation_does_not_decide_again(study, trial, make_trainer):
    it = study({"name": "asha", "options": {"min_resource": 1, "bootstrap_count": 9}})
    open_trial = it._storage.get_trial_id_from_study_id_trial_number(it._study_id, 0)
    it._storage.set_trial_intermediate_value(open_trial, 3, 0.5)
    trainer = trained(make_trainer, {"trial": trial()}, max_epochs=3)

    assert not trainer.state.pruned
    assert reported(it) == {3: 0.5}


def test_a_study_that_does_not_fit_ends_the_run_at_its_start(study, trial, make_trainer, tmp_path):
    place = str(tmp_path / "study.journal")
    without_study = make_trainer({"trial": trial()})
    with pytest.raises(CheckpointError, match="the study that the job belongs to is gone"):
        without_study.fit()

    study(NEVER)
    without_trial = make_trainer({"trial": Trial(place, "s", 7)})
    with pytest.raises(CheckpointError, match="has no trial 7 of 's'"):
        without_trial.fit()

    unnamed = optuna.create_study(study_name="unnamed", storage=open_storage(place))
    unnamed.ask()
    without_metric = make_trainer({"trial": Trial(place, "unnamed", 0)})

    with pytest.raises(CheckpointError, match="does not say which metric"):
        without_metric.fit()


def test_a_study_that_is_lost_on_the_way_is_a_warning(study, trial, make_trainer, tmp_path, caplog):
    class Lose(Callback):
        def on_epoch_start(self, trainer):
            (tmp_path / "study.journal").unlink(missing_ok=True)

    study(ALWAYS)
    trainer = trained(make_trainer, {"lose": Lose(), "trial": trial()}, max_epochs=3)

    assert trainer.done
    assert "this validation is not reported" in caplog.text


def test_the_main_process_decides_for_all(study, trial):
    study(ALWAYS)
    # At the start: no problem, the metric, no earlier end. At the boundary: it is pruned.
    answers = iter([None, "val/loss", None])

    class Other(Group):
        def broadcast(self, value):
            return next(answers, True)

    other = Other()
    other.rank = 1
    other.world_size = 2
    state = TrainState()
    metrics = {"val/loss": 1.0}
    trainer = SimpleNamespace(
        group=other,
        is_main=False,
        state=state,
        done=False,
        metrics=metrics,
    )
    callback = trial()
    callback.setup(trainer)
    callback.on_fit_start(trainer)

    assert state.stop_request is None

    state.global_step = 5
    state.validated_at = 5
    callback.on_boundary(trainer)

    assert state.stop_request == (PRUNED, 0)
    assert callback._trial is None  # only the main process opens it
