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
    """Train for real; the run is in `run` of the test's folder."""

    def begin(*overrides):
        return train([*QUICK, *overrides, f"run_dir={tmp_path / 'run'}"])

    return begin


@pytest.fixture
def lines(tmp_path):
    """Return what that run has logged."""
    return lambda: logged(tmp_path / "run")


def steps(lines, key):
    return [line["step"] for line in lines if key in line]


def values(lines, key):
    return [line[key] for line in lines if key in line]


def read_status(run):
    return json.loads((run / "status.json").read_text())


def ends_at_nothing(rates):
    """Whether a one-cycle schedule was made for just these updates, no more and no fewer."""
    least = min(rates)
    is_last = rates.index(least) >= len(rates) - 2
    return is_last and least < 1e-3 * max(rates)


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
    run(*[f"trainer.{word}" for word in words])

    log = lines()
    assert steps(log, "train/loss") == list(range(1, trained + 1))
    assert steps(log, "val/loss") == validated
    tests = steps(log, "test/loss")
    assert len(tests) == (1 if validated else 0)
    if "max_steps=30" not in words:  # the horizon is that of the epochs, too
        assert ends_at_nothing(values(log, "lr/default"))


# A schedule made for ten thousand epochs would hardly begin.
ENDLESS = ["trainer.max_epochs=10000", "lr_scheduler=constant"]


def test_time_ends_a_run_in_good_order(run, lines, tmp_path):
    run(*ENDLESS, "trainer.max_time=1.5")

    status = read_status(tmp_path / "run")
    assert status["state"] == "stopped"  # not finished: more time goes on
    assert status["code"] == 0
    assert "max_time" in status["reason"]
    assert status["resume"].endswith("resume=auto")
    log = lines()
    last = max(line["step"] for line in log)
    assert 0 < last < 200_000
    assert steps(log, "test/loss") == [status["best"]["step"]]


def test_more_time_goes_on(run, lines, tmp_path):
    run(*ENDLESS, "trainer.max_time=1.5")
    last = max(line["step"] for line in lines())

    resumed = run(*ENDLESS, "trainer.max_time=1", "resume=auto")

    assert f"resumed at step {last}" in resumed.err
    changed = [line for line in resumed.err.splitlines() if "changed: " in line]
    assert changed == ["  changed: trainer.max_time: 1.5 -> 1"]
    assert "ended by its time limit (trainer.max_time=1" in resumed.out
    log = lines()
    assert max(line["step"] for line in log) > last
    best = read_status(tmp_path / "run")["best"]
    assert steps(log, "test/loss") == [best["step"]]  # the earlier one is abandoned


@pytest.mark.parametrize("looks", [0, 1])
def test_a_look_at_validation_first_fails_early(train, tmp_path, looks):
    images = tmp_path / "images"
    write_digits(images, {"train": 4, "val": 2})
    first = next((images / "val" / "0").iterdir())
    first.write_bytes(b"broken")
    words = ["data=image_folder", f"data.root={images}", "data.image_size=8"]
    run = tmp_path / "run"

    train([*QUICK, *words, f"run_dir={run}", f"trainer.validate_at_start={looks}"], 3)

    log = run / "metrics.jsonl"
    has_trained = log.exists() and "train/loss" in log.read_text()
    assert has_trained == (looks == 0)


def test_debug_overfit(run, lines):
    done = run("debug=overfit", "callbacks.overfit.threshold=0.2", "trainer.overfit_batches=2")

    log = lines()
    trained = steps(log, "train/loss")
    assert trained == list(range(1, len(trained) + 1))
    assert len(trained) < 2 * 60
    *_, before_last, last = values(log, "train/loss")
    assert last <= 0.2 < before_last
    assert values(log, "train/epoch_accuracy")[-1] > 0.9
    assert "near zero" in done.out
    # Validated is what is trained on: 128 samples, no others.
    right = [accuracy * 128 for accuracy in values(log, "val/accuracy")]
    assert right == pytest.approx([round(number) for number in right], abs=1e-9)


OTHERS = ["regression", "multilabel", "segmentation", "char_lm", "gan"]


@pytest.mark.parametrize("experiment", OTHERS)
def test_other_tasks_have_a_plan(train, tmp_path, experiment):
    train([f"experiment={experiment}", "dry_run=true", f"run_dir={tmp_path / 'plan'}"])

    (file,) = (tmp_path / "plan").iterdir()
    plan = file.read_text()
    for part in ("Data", "Model", "Optimizer", "Updates", "FLOPs"):
        assert part in plan


@pytest.mark.parametrize("experiment", OTHERS)
def test_other_tasks_run_and_are_evaluated(train, tmp_path, experiment):
    train([f"experiment={experiment}", "debug=fast", f"run_dir={tmp_path / 'run'}"])

    log = logged(tmp_path / "run")
    assert max(line["step"] for line in log) == 2
    assert steps(log, "val/loss") == [2]
    assert steps(log, "test/loss") == [2]
    assert (tmp_path / "run" / "checkpoints" / "best.pt").exists()


TRIED = [*QUICK[:3], "trainer.max_epochs=3", "trainer.limit_train_batches=3"]
AT_ONCE = {"name": "asha", "options": {"min_resource": 1, "bootstrap_count": 9}}


def study_that_prunes_at_once(journal):
    """Begin a study of which each job ends at its first validation."""
    storage = open_storage(str(journal))
    study = optuna.create_study(study_name="s", storage=storage, direction="maximize")
    study.set_metric_names(["val/accuracy"])
    study.set_user_attr(PRUNER, AT_ONCE)
    study.ask()


def test_a_pruned_run_says_so_and_is_done(train, tmp_path):
    place = tmp_path / "run"
    journal = tmp_path / "study.journal"
    study_that_prunes_at_once(journal)
    words = [*TRIED, f"sweep.trial={{storage: '{journal}', study: s, number: 0}}"]

    run = train([*words, f"run_dir={place}"])
    again = train([*words, f"run_dir={place}", "resume=auto"])

    status = read_status(place)
    assert status["state"] == "pruned"
    assert status["reason"] == "pruned at epoch 1, step 3"
    assert "best/val/accuracy" in status["results"]
    for name in status["results"]:
        assert not name.startswith("test/")
    assert "pruned: its search ended it early" in run.out
    assert "is behind the other jobs" in run.err
    config = yaml.safe_load((place / "config.yaml").read_text())
    assert config["sweep"] is None
    assert "already pruned at epoch 1, step 3" in again.err


ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("conf/", "data/", "models/", "trainer/", "callbacks/", "scripts/")


def test_few_frames_of_ours_lie_between_the_command_and_a_step(train, tmp_path):
    shutil.copy(Path(__file__).with_name("user_code.py"), tmp_path / "users.py")
    words = ["experiment=resnet18", "model=mlp", "optimizer=sgd", "trainer.max_steps=1"]
    words.append("optimizer={_target_: users.Recording, lr: 0.1}")

    train(words, folder=tmp_path)

    frames = json.loads((tmp_path / "frames.json").read_text())
    ours = []
    for file, name in frames:
        place = file.removeprefix(f"{ROOT}/")
        if place.startswith(PACKAGES):
            ours.append(f"{place} {name}")
    from_command = ours[ours.index("scripts/train.py train") :]
    assert "trainer/trainer.py fit" in from_command
    assert len(from_command) <= 9, from_command
