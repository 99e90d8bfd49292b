"""How far, how often and on how much the loop goes, from the command line."""

import json

import numpy as np
import pytest
import yaml
from PIL import Image
from sklearn.datasets import load_digits

QUICK = [
    "experiment=resnet18",  # 20 updates an epoch
    "model=mlp",
    "optimizer=sgd_nesterov",
    "trainer.log_every_n_steps=1",
]


@pytest.fixture
def run(train, tmp_path):
    """Train for real and return the log; `folder` is where the run is."""

    def go(*overrides, name="run", code=0):
        done = train([*QUICK, *overrides, f"run_dir={tmp_path / name}"])
        assert done.code == code, done.err
        return done

    return go


@pytest.fixture
def lines(tmp_path):
    def read(name="run"):
        text = (tmp_path / name / "metrics.jsonl").read_text()
        return [json.loads(line) for line in text.splitlines()]

    return read


def steps(lines, key):
    return [line["step"] for line in lines if key in line]


def values(lines, key):
    return [line[key] for line in lines if key in line]


def ends_at_nothing(rates):
    """Whether a one-cycle schedule was made for just these updates, no more and no fewer."""
    return min(rates) < 1e-3 * max(rates) and rates.index(min(rates)) >= len(rates) - 2


def test_steps_alone_are_a_horizon(run, lines) -> None:
    run("trainer.max_epochs=null", "trainer.max_steps=27")
    assert steps(lines(), "train/loss") == list(range(1, 28))
    assert steps(lines(), "val/loss") == [20, 27]
    assert steps(lines(), "test/loss") == [27]
    assert ends_at_nothing(values(lines(), "lr/default"))


@pytest.mark.parametrize(
    ("epochs", "most", "last"),
    [pytest.param(1, 30, 20, id="epochs"), pytest.param(5, 30, 30, id="steps")],
)
def test_the_limit_that_comes_first_ends(run, lines, epochs, most, last) -> None:
    run(f"trainer.max_epochs={epochs}", f"trainer.max_steps={most}")
    assert steps(lines(), "train/loss")[-1] == last


def test_time_ends_a_run_in_good_order(run, lines, tmp_path) -> None:
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


def test_time_alone_is_a_horizon(run, lines) -> None:
    run("trainer.max_epochs=null", "trainer.max_time='0:00:01'", "lr_scheduler=constant")
    assert values(lines(), "test/loss")


def test_validation_by_steps(run, lines) -> None:
    run(
        "trainer.max_epochs=1",
        "trainer.validate_every_n_epochs=null",
        "trainer.validate_every_n_steps=6",
    )
    assert steps(lines(), "val/loss") == [6, 12, 18, 20]  # and at the end


def test_validation_by_epochs(run, lines) -> None:
    run("trainer.max_epochs=5", "trainer.validate_every_n_epochs=2", "trainer.max_steps=100")
    assert steps(lines(), "val/loss") == [40, 80, 100]


@pytest.mark.parametrize("limit", [pytest.param("5", id="count"), pytest.param("0.25", id="share")])
def test_fewer_batches_of_training(run, lines, limit) -> None:
    run("trainer.max_epochs=2", f"trainer.limit_train_batches={limit}")
    assert steps(lines(), "train/loss") == list(range(1, 11))
    assert steps(lines(), "val/loss") == [5, 10]
    assert ends_at_nothing(values(lines(), "lr/default"))


@pytest.mark.parametrize("limit", [pytest.param("1", id="count"), pytest.param("0.2", id="share")])
def test_fewer_batches_of_validation_and_test(run, lines, limit) -> None:
    """270 samples in batches of 64: the first holds a number of 64ths that are right."""
    limits = [f"trainer.limit_val_batches={limit}", f"trainer.limit_test_batches={limit}"]
    run("trainer.max_epochs=1", *limits)
    for key in ("val/accuracy", "test/accuracy"):
        (share,) = values(lines(), key)
        assert share * 64 == pytest.approx(round(share * 64), abs=1e-9)


def test_no_batches_of_validation_and_test(run, lines) -> None:
    run("trainer.max_epochs=1", "trainer.limit_val_batches=0", "trainer.limit_test_batches=0")
    keys = {key for line in lines() for key in line}
    assert not [key for key in keys if key.startswith(("val/", "test/"))]


@pytest.mark.parametrize("few", [pytest.param("2", id="count"), pytest.param("0.1", id="share")])
def test_few_batches_are_learnt_by_heart(run, lines, few) -> None:
    run("trainer.max_epochs=30", f"trainer.overfit_batches={few}", "transforms=basic")
    assert steps(lines(), "train/loss")[-1] == 60
    assert values(lines(), "val/accuracy")[-1] == 1.0
    # Validated is what is trained on: 128 samples, no others.
    share = values(lines(), "val/accuracy")[0]
    assert share * 128 == pytest.approx(round(share * 128), abs=1e-9)


def test_a_look_at_validation_first_changes_nothing(run, lines) -> None:
    """Dropout would tell if any random number had been drawn."""
    same = ["model=small_cnn", "model.dropout=0.3", "trainer.max_steps=3"]
    run(*same)
    run(*same, "trainer.validate_at_start=2", name="looked")
    assert values(lines("looked"), "train/loss") == values(lines(), "train/loss")
    assert steps(lines("looked"), "val/loss") == steps(lines(), "val/loss")


@pytest.mark.parametrize("looks", [0, 1])
def test_a_look_at_validation_first_fails_early(train, tmp_path, looks) -> None:
    images, labels = load_digits(return_X_y=True)
    for i, (pixels, label) in enumerate(zip(images[:60], labels[:60], strict=True)):
        split = "val" if i % 3 == 0 else "train"
        folder = tmp_path / "images" / split / str(label)
        folder.mkdir(parents=True, exist_ok=True)
        Image.fromarray((pixels.reshape(8, 8) * 15).astype(np.uint8)).save(folder / f"{i}.png")
    next((tmp_path / "images" / "val" / "0").iterdir()).write_bytes(b"broken")
    done = train(
        [
            *QUICK,
            "data=image_folder",
            f"data.root={tmp_path / 'images'}",
            "data.image_size=8",
            "trainer.max_epochs=1",
            f"trainer.validate_at_start={looks}",
            f"run_dir={tmp_path / 'run'}",
        ]
    )
    assert done.code == 3, done.err
    log = tmp_path / "run" / "metrics.jsonl"
    trained = log.exists() and "train/loss" in log.read_text()
    assert trained == (looks == 0)


def test_debug_fast(run, lines) -> None:
    run("debug=fast")
    assert steps(lines(), "train/loss") == [1, 2]
    assert steps(lines(), "val/loss") == steps(lines(), "test/loss") == [2]


def test_debug_overfit(run, lines) -> None:
    done = run("debug=overfit", "callbacks.overfit.threshold=0.2")
    trained = steps(lines(), "train/loss")
    assert trained == list(range(1, len(trained) + 1))
    assert len(trained) < 60
    assert values(lines(), "train/loss")[-1] <= 0.2 < values(lines(), "train/loss")[-2]
    assert values(lines(), "train/epoch_accuracy")[-1] > 0.9
    assert "overfitting: 60 updates of" in done.err
    assert "near zero" in done.out


def test_debug_profile(run, tmp_path) -> None:
    done = run("debug=profile")
    (trace,) = (tmp_path / "run" / "tensorboard" / "profile").glob("*.json")
    names = {event.get("name") for event in json.loads(trace.read_text())["traceEvents"]}
    assert "aten::addmm" in names
    assert "aten::addmm" in (tmp_path / "run" / "profile.txt").read_text()
    assert "profile" in done.err


def test_learning_rate_range_test(run, tmp_path) -> None:
    run(
        "callbacks=[progress,lr_finder]", "trainer.max_epochs=100", "callbacks.lr_finder.updates=30"
    )
    found = json.loads((tmp_path / "run" / "lr_finder.json").read_text())
    assert len(found["lr"]) == len(found["loss"]) <= 30
    assert found["lr"] == sorted(found["lr"])
    assert 1e-6 < found["suggestion"] < 1.0


def test_gradient_noise_knows_nothing_of_splits_and_resumes(run, lines, tmp_path) -> None:
    noisy = ["trainer.max_steps=12", "trainer.gradient_noise={eta: 0.01, gamma: 0.55}"]
    run(*noisy, "callbacks.checkpoint.every_n_steps=5", "callbacks.checkpoint.save_top_k=-1")
    run(*noisy, "trainer.gradient_accumulation_steps=3", name="split")
    whole = values(lines(), "train/loss")
    assert values(lines("split"), "train/loss") == pytest.approx(whole, rel=1e-4)

    checkpoint = tmp_path / "run" / "checkpoints" / "step-00000005.pt"
    run(
        *noisy,
        "callbacks.checkpoint.every_n_steps=5",
        "callbacks.checkpoint.save_top_k=-1",
        f"resume={checkpoint}",
        name="resumed",
    )
    assert values(lines("resumed"), "train/loss") == whole[5:]
    run("trainer.max_steps=12", name="quiet")
    assert values(lines("quiet"), "train/loss")[-1] != pytest.approx(whole[-1], rel=1e-4)


EXPERIMENTS = ["regression", "multilabel", "segmentation", "char_lm", "gan"]


@pytest.mark.parametrize("experiment", EXPERIMENTS)
def test_other_tasks_run_and_are_evaluated(train, tmp_path, experiment) -> None:
    overrides = [f"experiment={experiment}", "debug=fast", f"run_dir={tmp_path / 'run'}"]
    done = train(overrides)
    assert done.code == 0, done.err
    keys = {key for line in (tmp_path / "run/metrics.jsonl").open() for key in json.loads(line)}
    assert {"val/loss", "test/loss"} <= keys
    assert (tmp_path / "run" / "checkpoints" / "best.pt").exists()


@pytest.mark.parametrize("experiment", EXPERIMENTS)
def test_other_tasks_have_a_plan(train, tmp_path, experiment) -> None:
    done = train([f"experiment={experiment}", "dry_run=true", f"run_dir={tmp_path / 'run'}"])
    assert done.code == 0, done.err
    plan = (tmp_path / "run" / "plan.txt").read_text()
    for section in ("Data", "Model", "Optimizer", "Updates"):
        assert section in plan
    assert "FLOPs" in plan


@pytest.mark.slow
@pytest.mark.parametrize(
    ("experiment", "overrides"),
    [
        pytest.param("char_lm", ["loader.batch_size=5"], id="language"),
        pytest.param("regression", ["loader.batch_size=7"], id="regression"),
    ],
)
def test_two_processes_train_other_tasks_alike(train, tmp_path, experiment, overrides) -> None:
    """Limits and metrics are those of one process, too."""
    common = [f"experiment={experiment}", *overrides, "trainer.log_every_n_steps=1"]
    common += ["trainer.max_steps=4", "trainer.limit_val_batches=3", "trainer.limit_test_batches=1"]
    logs = {}
    for name, strategy in {"one": [], "two": ["strategy=ddp", "strategy.devices=2"]}.items():
        done = train([*common, *strategy, f"run_dir={tmp_path / name}"])
        assert done.code == 0, done.err
        text = (tmp_path / name / "metrics.jsonl").read_text()
        logs[name] = [json.loads(line) for line in text.splitlines()]
    for one, two in zip(logs["one"], logs["two"], strict=True):
        kept = [key for key in one if not key.startswith(("time/", "memory/"))]
        assert {k: two[k] for k in kept} == pytest.approx({k: one[k] for k in kept}, rel=1e-4)


@pytest.mark.parametrize(
    "option",
    [
        "task/loss=label_smoothing",
        "task/loss=class_weights",
        "task/loss=weighted_sum",
        "task/loss=input_gradient_penalty",
        "task/loss=parameter_gradient_penalty",
        "task/metrics=per_class",
    ],
)
def test_losses_and_metrics_of_a_group(run, lines, tmp_path, option) -> None:
    run(option, "debug=fast")
    config = yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())
    keys = {key for line in lines() for key in line}
    terms = [name for name in config["task"]["loss"] if name not in ("_target_", "weight")]
    if "_target_" not in config["task"]["loss"]:
        assert {f"train/loss_{name}" for name in terms} <= keys
    for name in config["task"]["metrics"]:
        assert [key for key in keys if key.startswith(f"val/{name}")]
