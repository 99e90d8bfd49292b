"""Runs that are jobs of a search, by the command line: pruned, gone on with, or left to the end."""

import json

import pytest
import yaml

from callbacks.trial import PRUNER, open_storage
from same_run import differences

optuna = pytest.importorskip("optuna")
pytestmark = pytest.mark.filterwarnings("ignore::optuna.exceptions.ExperimentalWarning")
JOB = [
    "experiment=resnet18",
    "model=mlp",
    "optimizer=sgd_nesterov",
    "model.hidden=[16]",
    "loader.num_workers=0",
    "trainer.max_epochs=3",
    "trainer.limit_train_batches=3",
    "callbacks.model_summary=null",
]
AT_ONCE = {"name": "asha", "options": {"min_resource": 1, "bootstrap_count": 9}}
NEVER = {"name": None, "options": {}}


@pytest.fixture
def trial(tmp_path):
    """Make a study in which every job ends at its first validation, and return a job's override."""

    def make(pruner=AT_ONCE):
        place = tmp_path / "study.journal"
        study = optuna.create_study(
            study_name="s", storage=open_storage(str(place)), direction="maximize"
        )
        study.set_metric_names(["val/accuracy"])
        study.set_user_attr(PRUNER, pruner)
        study.ask()
        return f"sweep.trial={{storage: '{place}', study: s, number: 0}}"

    return make


def status_of(run):
    return json.loads((run / "status.json").read_text())


def test_a_pruned_run_says_so_and_is_done(train, trial, tmp_path):
    place, override = tmp_path / "run", trial()
    run = train([*JOB, override, f"run_dir={place}"])
    assert run.code == 0, run.err
    status = status_of(place)
    assert (status["state"], status["reason"]) == ("pruned", "pruned at epoch 1, step 3")
    assert "best/val/accuracy" in status["results"]
    assert not any(key.startswith("test/") for key in status["results"])
    assert "pruned: its search ended it early" in run.out
    assert "is behind the other jobs" in run.err
    assert yaml.safe_load((place / "config.yaml").read_text())["sweep"] is None
    again = train([*JOB, override, f"run_dir={place}", "resume=auto"])
    assert (again.code, "already pruned at epoch 1, step 3" in again.err) == (0, True)


def test_a_run_to_the_end_is_the_run_without_a_search(train, trial, tmp_path):
    for name, more in {"with": [trial(NEVER)], "without": []}.items():
        assert train([*JOB, *more, f"run_dir={tmp_path / name}"]).code == 0
    assert differences(tmp_path / "with", tmp_path / "without") == []


def test_a_preempted_job_goes_on_with_its_trial(start, train, trial, tmp_path):
    place, override = tmp_path / "run", trial(NEVER)
    more = ["trainer.max_epochs=400", f"run_dir={place}"]
    run = start([*JOB, override, *more])
    run.until(lambda: (place / "checkpoints" / "last.pt").exists())
    run.send(15)
    assert run.wait().code == 143
    command = status_of(place)["resume"]
    assert "sweep.trial=" in command
    study = optuna.load_study(study_name="s", storage=open_storage(str(tmp_path / "study.journal")))
    epochs = len(study.trials[0].intermediate_values)
    assert epochs
    study.set_user_attr(PRUNER, AT_ONCE)
    again = train([*JOB, override, *more, "resume=auto"])
    assert (again.code, status_of(place)["state"]) == (0, "pruned")
    assert list(study.trials[0].intermediate_values) == list(range(1, epochs + 2))


@pytest.mark.slow
def test_two_processes_end_as_one(start, trial, tmp_path):
    more = ["strategy=ddp", "strategy.devices=2", "strategy.backend=gloo"]
    run = start([*JOB, *more, trial(), f"run_dir={tmp_path / 'run'}"]).wait(300)
    assert run.code == 0, run.err
    assert status_of(tmp_path / "run")["state"] == "pruned"
