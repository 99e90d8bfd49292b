"""How far, how often and on how much the loop goes; jobs of a search; how deep a run stands."""

import json
import shutil
from pathlib import Path

import optuna
import pytest
import yaml

from regimen.callbacks.trial import PRUNER, open_storage
from same_run import logged
from toy_pictures import write_digits

pytestmark = pytest.mark.filterwarnings("ignore::optuna.exceptions.ExperimentalWarning")
QUICK = [
    "experiment=resnet18",  # 20 updates an epoch
    "model=mlp",
    "optimizer=sgd_nesterov",
    "trainer.log_every_n_steps=1",
]


@pytest.fixture
def run(train, tmp_path):
    """Train for real and return the log; `folder` is where the run is."""

    return lambda *overrides: train([*QUICK, *overrides, f"run_dir={tmp_path / 'run'}"])


@pytest.fixture
def lines(tmp_path):
    return lambda: logged(tmp_path / "run")


def steps(lines, key):
    return [line["step"] for line in lines if key in line]


def values(lines, key):
    return [line[key] for line in lines if key in line]


def ends_at_nothing(rates):
    """Whether a one-cycle schedule was made for just these updates, no more and no fewer."""
    return min(rates) < 1e-3 * max(rates) and rates.index(min(rates)) >= len(rates) - 2


@pytest.mark.parametrize(
    ("words", "trained", "validated"),
    [
        pytest.param(["max_epochs=null", "max_steps=27"], 27, [20, 27], id="steps-alone"),
        pytest.param(["max_epochs=5", "max_steps=30"], 30, [20, 30], id="steps-first"),
        pytest.param(["max_epochs=1", "max_steps=30"], 20, [20], id="epochs-first"),
        pytest.param(
            ["max_epochs=1", "validate_every_n_epochs=null", "validate_every_n_steps=6"],
            20,
            [6, 12, 18, 20],  # and at the end
            id="validation-by-steps",
        ),
        pytest.param(["max_epochs=3", "validate_every_n_epochs=2"], 60, [40, 60], id="by-epochs"),
        pytest.param(["max_epochs=2", "limit_train_batches=0.25"], 10, [5, 10], id="share"),
        pytest.param(
            ["max_epochs=1", "limit_val_batches=0", "limit_test_batches=0"], 20, [], id="no-others"
        ),
    ],
)
def test_how_far_and_how_often(run, lines, words, trained, validated):
    run(*(f"trainer.{word}" for word in words))
    assert steps(lines(), "train/loss") == list(range(1, trained + 1))
    assert steps(lines(), "val/loss") == validated
    assert len(steps(lines(), "test/loss")) == (validated != [])
    if "max_steps=30" not in words:  # the horizon is that of the epochs, too
        assert ends_at_nothing(values(lines(), "lr/default"))


def test_time_ends_a_run_in_good_order(run, lines, tmp_path):
    # constant: a schedule made for ten thousand epochs would hardly begin
    run("trainer.max_epochs=10000", "trainer.max_time=1.5", "lr_scheduler=constant")
    status = json.loads((tmp_path / "run" / "status.json").read_text())
    assert (status["state"], status["code"]) == ("stopped", 0)  # not finished: more time goes on
    assert "max_time" in status["reason"]
    assert status["resume"].endswith("resume=auto")
    last = max(line["step"] for line in lines())
    assert 0 < last < 200_000
    assert steps(lines(), "test/loss") == [status["best"]["step"]]
    again = ["trainer.max_epochs=10000", "trainer.max_time=1", "lr_scheduler=constant"]
    resumed = run(*again, "resume=auto")
    assert f"resumed at step {last}" in resumed.err
    changed = [line for line in resumed.err.splitlines() if "changed: " in line]
    assert changed == ["  changed: trainer.max_time: 1.5 -> 1"]
    assert "ended by its time limit (trainer.max_time=1" in resumed.out
    assert max(line["step"] for line in lines()) > last
    status = json.loads((tmp_path / "run" / "status.json").read_text())
    assert steps(lines(), "test/loss") == [status["best"]["step"]]  # the earlier one is abandoned


def test_a_look_at_validation_first_fails_early(train, tmp_path):
    write_digits(tmp_path / "images", {"train": 4, "val": 2})
    next((tmp_path / "images" / "val" / "0").iterdir()).write_bytes(b"broken")
    words = ["data=image_folder", f"data.root={tmp_path / 'images'}", "data.image_size=8"]
    for looks in (0, 1):
        run = tmp_path / str(looks)
        train([*QUICK, *words, f"run_dir={run}", f"trainer.validate_at_start={looks}"], 3)
        log = run / "metrics.jsonl"
        assert (log.exists() and "train/loss" in log.read_text()) == (looks == 0)


def test_debug_overfit(run, lines):
    done = run("debug=overfit", "callbacks.overfit.threshold=0.2", "trainer.overfit_batches=2")
    trained = steps(lines(), "train/loss")
    assert trained == list(range(1, len(trained) + 1))
    assert len(trained) < 2 * 60
    assert values(lines(), "train/loss")[-1] <= 0.2 < values(lines(), "train/loss")[-2]
    assert values(lines(), "train/epoch_accuracy")[-1] > 0.9
    assert "near zero" in done.out
    # Validated is what is trained on: 128 samples, no others.
    shares = [share * 128 for share in values(lines(), "val/accuracy")]
    assert shares == pytest.approx([*map(round, shares)], abs=1e-9)


@pytest.mark.parametrize(
    "experiment", ["regression", "multilabel", "segmentation", "char_lm", "gan"]
)
def test_other_tasks_have_a_plan_run_and_are_evaluated(train, tmp_path, experiment):
    train([f"experiment={experiment}", "dry_run=true", f"run_dir={tmp_path / 'plan'}"])
    (plan,) = (path.read_text() for path in (tmp_path / "plan").iterdir())
    parts = ("Data", "Model", "Optimizer", "Updates", "FLOPs")
    assert [part for part in parts if part not in plan] == []
    train([f"experiment={experiment}", "debug=fast", f"run_dir={tmp_path / 'run'}"])
    lines = logged(tmp_path / "run")
    assert max(line["step"] for line in lines) == 2
    assert steps(lines, "val/loss") == steps(lines, "test/loss") == [2]
    assert (tmp_path / "run" / "checkpoints" / "best.pt").exists()


TRIED = [*QUICK[:3], "trainer.max_epochs=3", "trainer.limit_train_batches=3"]
AT_ONCE = {"name": "asha", "options": {"min_resource": 1, "bootstrap_count": 9}}


def test_a_pruned_run_says_so_and_is_done(train, tmp_path):
    place = tmp_path / "run"
    journal = tmp_path / "study.journal"
    # Every job of this study ends at its first validation.
    storage = open_storage(str(journal))
    study = optuna.create_study(study_name="s", storage=storage, direction="maximize")
    study.set_metric_names(["val/accuracy"])
    study.set_user_attr(PRUNER, AT_ONCE)
    study.ask()
    trial = f"sweep.trial={{storage: '{journal}', study: s, number: 0}}"
    run = train([*TRIED, trial, f"run_dir={place}"])
    status = json.loads((place / "status.json").read_text())
    assert (status["state"], status["reason"]) == ("pruned", "pruned at epoch 1, step 3")
    assert "best/val/accuracy" in status["results"]
    assert not any(key.startswith("test/") for key in status["results"])
    assert "pruned: its search ended it early" in run.out
    assert "is behind the other jobs" in run.err
    assert yaml.safe_load((place / "config.yaml").read_text())["sweep"] is None
    again = train([*TRIED, trial, f"run_dir={place}", "resume=auto"])
    assert "already pruned at epoch 1, step 3" in again.err


ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("conf/", "data/", "models/", "trainer/", "callbacks/", "scripts/")


def test_few_frames_of_ours_lie_between_the_command_and_a_step(train, tmp_path):
    shutil.copy(Path(__file__).with_name("user_code.py"), tmp_path / "users.py")
    words = [*QUICK[:2], "optimizer=sgd", "optimizer={_target_: users.Recording, lr: 0.1}"]
    train([*words, "trainer.max_steps=1"], folder=tmp_path)
    frames = json.loads((tmp_path / "frames.json").read_text())
    named = [f"{file.removeprefix(f'{ROOT}/')} {name}" for file, name in frames]
    ours = [name for name in named if name.startswith(PACKAGES)]
    ours = ours[ours.index("scripts/train.py train") :]  # from the command's function
    assert "trainer/trainer.py fit" in ours
    assert len(ours) <= 9, ours
