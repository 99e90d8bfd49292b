"""The run of a Trainer from Python: its directory, its history, its end, and what is read of it."""

import json
import logging
import os
import signal
import subprocess
import sys
import threading

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from regimen import load_run, loader
from regimen.callbacks.checkpoint import Checkpoint
from regimen.callbacks.early_stopping import EarlyStopping
from regimen.callbacks.ema import EMA
from regimen.callbacks.progress import Progress
from regimen.conf.errors import ConfigError
from regimen.scripts.list_runs import runs
from regimen.trainer.callback import Callback
from regimen.trainer.errors import CheckpointError, ModelError
from regimen.trainer.options import TrainerOptions
from regimen.trainer.runs.status import RunDirectoryError, read_status
from regimen.trainer.task import Task
from regimen.trainer.tasks.classification import Classification
from regimen.trainer.trainer import Trainer

INPUTS = torch.randn(24, 8, generator=torch.Generator().manual_seed(1))
LABELS = INPUTS[:, :3].argmax(1)
DATA = DataLoader(TensorDataset(INPUTS, LABELS), batch_size=8)
UPDATES = 3  # of an epoch


def trainer_of(run_dir=None, callbacks=None, epochs=2, val=DATA, task=None, **more):
    torch.manual_seed(0)
    model = nn.Linear(8, 3)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    options = TrainerOptions(max_epochs=epochs)
    given = {
        "callbacks": callbacks,
        "run_dir": run_dir,
        "options": options,
        **more,
    }
    return Trainer(model, task or Classification(3), optimizer, DATA, val, **given)


def files_of(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def lines_of(path):
    """Return the lines that a run logged."""
    text = (path / "metrics.jsonl").read_text()
    return [json.loads(line) for line in text.splitlines()]


def answers_of(model):
    """Return the softmax [24, 3] of what a model says of the inputs."""
    with torch.no_grad():
        return model(INPUTS).softmax(1)


class Press(Callback):
    """Send Ctrl-C to this process in an update, or raise what it makes there."""

    def __init__(self, update, raises=False):
        self.update = update
        self.raises = raises

    def on_update_end(self, trainer):
        if trainer.state.updates != self.update:
            return
        self.update = 0  # once
        if self.raises:
            raise KeyboardInterrupt
        os.kill(os.getpid(), signal.SIGINT)


def test_a_second_run_does_not_touch_the_first(tmp_path):
    trainer_of(tmp_path, [Checkpoint()]).fit()
    before = files_of(tmp_path)

    second = trainer_of(tmp_path, [Checkpoint()], epochs=1)

    with pytest.raises(ConfigError, match=r"already holds a run; fit\(resume='auto'\) goes on"):
        second.fit()
    assert files_of(tmp_path) == before

    third = trainer_of(tmp_path, [Checkpoint()], epochs=1, overwrite=True)
    third.fit()
    of_the_first = tmp_path / "checkpoints" / f"step-{2 * UPDATES:08d}.pt"

    assert {line["step"] for line in lines_of(tmp_path)} == {UPDATES}
    assert not of_the_first.exists()


def test_files_of_others_are_neither_overwritten_nor_removed(tmp_path):
    notes = tmp_path / "notes.txt"
    trainer_of(tmp_path, [Checkpoint()]).fit()
    notes.write_text("mine")
    trainer_of(tmp_path, [Checkpoint()], overwrite=True).fit()

    assert notes.read_text() == "mine"

    other = tmp_path / "other"
    (other / "csv").mkdir(parents=True)
    with pytest.raises(RunDirectoryError, match="holds csv, and no run"):
        trainer_of(other, overwrite=True).fit()


def test_a_run_that_goes_on_cannot_be_overwritten(tmp_path):
    trainer_of(tmp_path, [Checkpoint()]).fit()
    trainer = trainer_of(tmp_path, [Checkpoint()], overwrite=True)
    with pytest.raises(ConfigError, match="overwrite=True would remove it"):
        trainer.fit(resume="auto")


def test_without_a_directory_nothing_is_written(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    trainer_of().fit()
    assert list(tmp_path.iterdir()) == []


def test_a_run_of_a_trainer_is_a_run(tmp_path, capsys):
    path = tmp_path / "a"
    trainer = trainer_of(path, [Checkpoint()])
    trainer.fit()

    status = read_status(path)
    log = (path / "train.log").read_text()

    assert status["state"] == "finished"
    assert status["code"] == 0
    assert status["best"]["metric"] == "val/accuracy"
    assert status["results"]["val/loss"] == trainer.metrics["val/loss"]
    assert "epoch 2/2, step 6: val/accuracy" in log

    capsys.readouterr()
    runs([str(tmp_path), "--json"])
    printed = capsys.readouterr().out
    (listed,) = json.loads(printed)

    assert listed["status"] == "finished"
    assert listed["epoch"] == 2
    assert listed["max_epochs"] == 2


@pytest.mark.quick
@pytest.mark.parametrize("own", [False, True], ids=["same object", "another process's"])
def test_a_run_that_goes_on_is_the_one_that_was_never_ended(tmp_path, own):
    whole = trainer_of(tmp_path / "whole", [Checkpoint()], epochs=4)
    whole.fit()
    parts = trainer_of(tmp_path / "parts", [Checkpoint()])
    parts.fit()
    if own:
        parts = trainer_of(tmp_path / "parts", [Checkpoint()], epochs=4)
        parts.fit(resume="auto")
    else:
        parts.fit(max_epochs=4)

    assert torch.equal(whole.model.weight, parts.model.weight)
    assert whole.history == parts.history

    log_of_whole = (tmp_path / "whole" / "metrics.jsonl").read_text()
    log_of_parts = (tmp_path / "parts" / "metrics.jsonl").read_text()
    assert log_of_whole == log_of_parts


def test_a_failure_is_recorded(tmp_path):
    class Fails(Callback):
        def on_epoch_end(self, trainer):
            raise ValueError("no more")

    with pytest.raises(ValueError, match="no more"):
        trainer_of(tmp_path, [Fails()]).fit()

    status = read_status(tmp_path)
    log = (tmp_path / "train.log").read_text()
    assert status["state"] == "failed"
    assert status["code"] == 1
    assert "no more" in log


def test_a_mistake_leaves_nothing(tmp_path):
    of_no_metric = Checkpoint(monitor="val/nothing")
    with pytest.raises(ConfigError):
        trainer_of(tmp_path / "wrong", [of_no_metric]).fit()
    assert not (tmp_path / "wrong" / "manifest.json").exists()


def test_two_trainers_do_not_write_to_one_directory(tmp_path):
    class Beside(Callback):
        def on_update_end(self, trainer):
            other = trainer_of(tmp_path, overwrite=True)
            with pytest.raises(RunDirectoryError):
                other.fit()

    trainer_of(tmp_path, [Beside()], epochs=1).fit()


@pytest.mark.parametrize(
    "callbacks",
    [
        pytest.param(None, id="none"),
        pytest.param([EMA()], id="a list"),
        pytest.param({"mine": EMA()}, id="a dict"),
    ],
)
def test_epoch_lines_are_printed_unless_told_otherwise(capsys, callbacks):
    trainer_of(callbacks=callbacks, epochs=1).fit()
    lines = capsys.readouterr().err.splitlines()
    assert [line.partition(":")[0] for line in lines] == ["epoch 1/1, step 3"] * 2

    trainer_of(callbacks=callbacks, epochs=1, verbose=False).fit()
    assert capsys.readouterr().err == ""


def test_a_callback_that_shows_the_progress_takes_their_place():
    trainer = trainer_of(callbacks=[Progress()])
    assert list(trainer.callbacks) == ["progress"]


def test_callbacks_of_a_list_are_named_as_their_classes():
    given = [EarlyStopping(), EMA(), EMA(use_for_evaluation=False)]
    trainer = trainer_of(callbacks=given, verbose=False)

    assert list(trainer.callbacks) == ["early_stopping", "ema", "ema_2"]
    assert [callback.name for callback in given] == ["early_stopping", "ema", "ema_2"]
    with pytest.raises(ModelError, match="'type' is the class EMA: give objects"):
        trainer_of(callbacks=[EMA])


def test_validation_sets_are_named_as_in_yaml(capsys):
    sets = {"clean": DATA, "val/noisy": DATA}
    checkpoint = Checkpoint(monitor="val/clean/loss")
    trainer = trainer_of(val=sets, callbacks=[checkpoint], epochs=1)
    trainer.fit()

    assert list(trainer.val_loaders) == ["val/clean", "val/noisy"]
    assert "val/clean/loss" in capsys.readouterr().err
    assert trainer.evaluate().keys() == {
        "val/clean/loss",
        "val/clean/accuracy",
        "val/noisy/loss",
        "val/noisy/accuracy",
    }


def test_the_history_has_a_row_for_each_step():
    trainer = trainer_of(callbacks={})
    trainer.fit()

    first, last = trainer.history

    assert (first["step"], first["epoch"]) == (3, 1)
    assert (last["step"], last["epoch"]) == (6, 2)

    metrics = {name: value for name, value in last.items() if name not in ("step", "epoch")}
    assert metrics
    assert metrics == {name: trainer.metrics[name] for name in metrics}


@pytest.mark.parametrize(
    "given",
    [
        pytest.param(INPUTS, id="a tensor"),
        pytest.param(INPUTS.double().numpy(), id="an array of float64"),
        pytest.param(DATA, id="a loader with labels"),
        pytest.param(loader(INPUTS, LABELS, batch_size=5, shuffle=False), id="a loader of ours"),
        pytest.param([INPUTS[:5], INPUTS[5:]], id="batches of inputs"),
    ],
)
def test_predictions_are_the_softmax_of_the_logits(given):
    trainer = trainer_of(callbacks={})
    trainer.fit()
    expected = answers_of(trainer.model)

    torch.testing.assert_close(trainer.predict(given), expected)
    torch.testing.assert_close(trainer.predict(given, batch_size=7), expected)
    assert trainer.model.training  # as it was


@pytest.mark.parametrize(
    "given",
    [
        pytest.param(loader(INPUTS, LABELS, batch_size=8), id="ours"),
        pytest.param(DataLoader(TensorDataset(INPUTS, LABELS), 8, shuffle=True), id="torch's"),
    ],
)
def test_answers_in_an_order_that_nobody_knows_are_refused(given):
    trainer = trainer_of(callbacks={})
    with pytest.raises(ModelError, match="shuffle=False"):
        trainer.predict(given)


def test_the_trainers_own_loaders_are_predicted_if_their_order_is_known():
    trainer = trainer_of(callbacks={})
    found = trainer.predict(trainer.val_loaders["val"])
    torch.testing.assert_close(found, answers_of(trainer.model))

    shuffled = DataLoader(TensorDataset(INPUTS, LABELS), 8, shuffle=True)
    trainer = trainer_of(callbacks={}, val=shuffled)
    with pytest.raises(ModelError, match="shuffle=False"):
        trainer.predict(trainer.val_loaders["val"])


class Understated(IterableDataset):
    """A stream that is longer than it says."""

    def __iter__(self):
        samples = zip(INPUTS, LABELS.tolist(), strict=True)
        return iter(samples)

    def __len__(self):
        return 8


@pytest.mark.filterwarnings("ignore:Length of IterableDataset")
def test_a_validation_reads_a_stream_to_its_end():
    stream = DataLoader(Understated(), 8)
    trainer = trainer_of(callbacks={}, epochs=1, val=stream)
    trainer.fit()

    is_right = answers_of(trainer.model).argmax(1) == LABELS
    accuracy = is_right.double().mean().item()

    assert trainer.metrics["val/accuracy"] == pytest.approx(accuracy, abs=1e-12)
    assert trainer.evaluate()["val/accuracy"] == pytest.approx(accuracy, abs=1e-12)


def test_an_evaluation_is_the_one_of_the_last_epoch():
    trainer = trainer_of(callbacks={})
    trainer.fit()
    logged = {n: v for n, v in trainer.metrics.items() if n.startswith("val/")}
    assert trainer.evaluate() == logged


def test_an_evaluation_needs_a_loader():
    trainer = trainer_of(val=None)
    with pytest.raises(ModelError, match="no val_loader"):
        trainer.evaluate()


def test_the_best_weights_come_back(tmp_path):
    weights = {}

    class Keep(Callback):
        def on_boundary(self, trainer):
            step = trainer.state.global_step
            weights[step] = trainer.model.weight.detach().clone()

    # The loss falls: its maximum is that of the first epoch.
    checkpoint = Checkpoint(monitor="val/loss", mode="max")
    trainer = trainer_of(tmp_path, [Keep(), checkpoint])
    trainer.fit()
    point = trainer.load_best()

    assert point.step == UPDATES
    assert torch.equal(trainer.model.weight, weights[UPDATES])


def test_best_weights_need_a_run_directory():
    trainer = trainer_of()
    with pytest.raises(CheckpointError, match="give Trainer a run_dir"):
        trainer.load_best()


def test_a_fit_that_has_nothing_to_do_says_why(caplog):
    trainer = trainer_of(callbacks={})
    trainer.fit()
    with caplog.at_level(logging.WARNING):
        trainer.fit()

    assert "max_epochs=2 is reached, at epoch 2, step 6" in caplog.text

    trainer.fit(max_epochs=3)
    assert trainer.state.epoch == 3
    for wrong in (0, -1, "4", 2.5, True):
        with pytest.raises(ConfigError, match="max_epochs"):
            trainer.fit(max_epochs=wrong)


def test_a_fit_after_a_stop_says_why_it_has_nothing_to_do(caplog):
    class Stop(Callback):
        def on_epoch_end(self, trainer):
            trainer.state.request_stop("enough")

    stopped = trainer_of(callbacks=[Stop()], epochs=4)
    stopped.fit()
    caplog.clear()
    stopped.fit()

    assert "was stopped at epoch 1, step 3 (enough)" in caplog.text

    stopped.fit(max_epochs=4)
    assert stopped.state.epoch == 2


def test_a_trainer_shows_its_plan():
    lines = repr(trainer_of()).splitlines()
    assert len(lines) <= 10
    assert "27 trained parameters of 27" in lines[1]
    assert any("max_epochs=2" in line for line in lines)


@pytest.mark.parametrize("raises", [False, True], ids=["a signal", "an exception"])
def test_an_interrupted_training_says_in_one_line_how_it_goes_on(tmp_path, raises):
    handler = signal.getsignal(signal.SIGINT)
    trainer = trainer_of(tmp_path, [Checkpoint(), Press(4, raises)])

    with pytest.raises(KeyboardInterrupt) as caught:
        trainer.fit()

    status = read_status(tmp_path)
    (line,) = caught.value._render_traceback_()
    assert type(caught.value) is KeyboardInterrupt  # or Python would not exit with 130
    assert "trainer.fit() goes on" in line
    assert "\n" not in line
    assert signal.getsignal(signal.SIGINT) is handler
    assert status["state"] == "preempted"
    assert status["code"] == 130

    trainer.fit()
    uninterrupted = trainer_of()
    uninterrupted.fit()

    assert trainer.state.global_step == 2 * UPDATES

    if not raises:  # an exception in a hook comes before the update is counted as a boundary's
        assert "update 1 of epoch 1, step 4" in line
        assert torch.equal(trainer.model.weight, uninterrupted.model.weight)


def test_an_interrupt_of_the_validation_at_the_start_ends_the_training_in_good_order():
    class Pressed(Callback):
        def __init__(self):
            self.called = []

        def on_fit_start(self, trainer):
            self.called.append("on_fit_start")

        def on_evaluation_batch(self, trainer, stage, done, batches):
            os.kill(os.getpid(), signal.SIGINT)

        def on_update_start(self, trainer, micro_batches):
            self.called.append("on_update_start")

        def on_fit_end(self, trainer):
            self.called.append("on_fit_end")

    pressed = Pressed()
    trainer = trainer_of(callbacks=[pressed])
    trainer.options.validate_at_start = 1

    with pytest.raises(KeyboardInterrupt):
        trainer.fit()
    assert pressed.called == ["on_fit_start", "on_fit_end"]


def test_an_interrupted_run_goes_on_in_another_process(tmp_path):
    first = trainer_of(tmp_path, [Checkpoint(), Press(4)])
    with pytest.raises(KeyboardInterrupt):
        first.fit()

    second = trainer_of(tmp_path, [Checkpoint()])
    second.fit(resume="auto")
    whole = trainer_of()
    whole.fit()

    assert torch.equal(second.model.weight, whole.model.weight)
    assert second.history[-1]["step"] == 2 * UPDATES


def test_a_training_beside_the_main_thread_sets_no_handler():
    trainer = trainer_of(callbacks={})
    thread = threading.Thread(target=trainer.fit)
    thread.start()
    thread.join(60)

    assert trainer.done


SCRIPT = """
import os, signal, torch
from regimen import Callback, Trainer
from regimen.trainer.tasks.regression import Regression
class Press(Callback):
    def on_update_end(self, trainer):
        os.kill(os.getpid(), signal.SIGINT)
model = torch.nn.Linear(2, 1)
data = [(torch.ones(4, 2), torch.ones(4))] * 3
Trainer(model, Regression(), torch.optim.SGD(model.parameters(), 0.1), data,
        callbacks=[Press()]).fit()
print("not reached")
"""


def test_a_script_that_is_interrupted_exits_as_python_does():
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True)
    assert done.returncode in (130, -signal.SIGINT)
    assert done.stdout == ""

    last = done.stderr.splitlines()[-1]
    assert last == (
        "KeyboardInterrupt: stopped after update 1 of epoch 0, step 1; trainer.fit() goes on"
    )


@pytest.mark.parametrize("average", [False, True], ids=["weights", "an average"])
def test_a_run_is_loaded_into_a_model_at_hand(tmp_path, average):
    callbacks = [Checkpoint(), EMA(0.5)] if average else [Checkpoint()]
    trainer = trainer_of(tmp_path, callbacks)
    trainer.fit()
    trainer.load_best()
    expected = trainer.predict(INPUTS)
    probabilities, classes = expected.max(1)

    model = nn.Linear(8, 3)
    run = load_run(tmp_path, "cpu", model=model)
    rows = run.predict(INPUTS.double().numpy())

    assert run.model() is model
    assert run.metrics[-1]["step"] == 2 * UPDATES
    torch.testing.assert_close(answers_of(model), expected)

    said = torch.tensor([row["probability"] for row in rows])
    predicted = [row["prediction"] for row in rows]
    torch.testing.assert_close(said, probabilities)
    assert predicted == [str(label) for label in classes.tolist()]


def test_each_checkpoint_of_a_model_at_hand_is_loaded_anew(tmp_path):
    trainer_of(tmp_path, [Checkpoint(save_top_k=-1)]).fit()
    run = load_run(tmp_path, "cpu", model=nn.Linear(8, 3))
    first = str(tmp_path / "checkpoints" / "step-00000003.pt")
    before = run.predict(INPUTS, checkpoint=first)

    assert run.predict(INPUTS, checkpoint="last") != before
    assert run.predict(INPUTS, checkpoint=first) == before


def test_a_run_of_a_trainer_says_what_is_missing(tmp_path):
    class Own(Task):
        def training_step(self, model, batch):
            inputs, _ = batch
            return model(inputs).square().mean()

    trainer_of(tmp_path, [Checkpoint()], task=Own()).fit()

    with pytest.raises(ConfigError, match="files describe no model; load_run"):
        load_run(tmp_path)

    without_task = load_run(tmp_path, "cpu", model=nn.Linear(8, 3))
    with pytest.raises(ConfigError, match=r"task=\.\.\.\) takes it"):
        without_task.predict(INPUTS)

    of_another_size = load_run(tmp_path, "cpu", model=nn.Linear(4, 3), task=Own())
    with pytest.raises(CheckpointError, match="does not fit the model"):
        of_another_size.predict(np.zeros((1, 4)))

    run = load_run(tmp_path, "cpu", model=nn.Linear(8, 3), task=Own())
    assert len(run.predict(INPUTS)) == len(INPUTS)
