"""A Trainer that a person builds in Python does what they expect from YAML."""

import logging

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from callbacks.checkpoint import Checkpoint
from callbacks.overfit import Overfit
from conf.schema import TrainerConfig
from trainer import snapshot
from trainer.callback import Callback
from trainer.errors import CheckpointError, ModelError, StorageError
from trainer.options import TrainerOptions
from trainer.task import StepOutput
from trainer.tasks.classification import Classification
from trainer.trainer import Trainer


class Coupled(Classification):
    couples_samples = True


def trainer_of(callbacks=None, task=None, run_dir=None, **options):
    torch.manual_seed(0)
    inputs = torch.randn(24, 8)
    data = TensorDataset(inputs, inputs[:, :3].argmax(1))
    model = nn.Linear(8, 3)
    return Trainer(
        model,
        task or Classification(3),
        torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
        DataLoader(data, batch_size=8),
        DataLoader(data, batch_size=8),
        callbacks=callbacks,
        run_dir=run_dir,
        options=TrainerOptions(**{"max_epochs": 2, **options}),
    )


def weights(trainer):
    return [p.detach().clone() for p in trainer.model.parameters()]


def test_fit_tells_each_epoch_unless_it_is_told_not_to(capsys):
    trainer_of().fit()
    lines = capsys.readouterr().err.splitlines()
    assert [line.partition(":")[0] for line in lines] == [
        "epoch 1/2, step 3",
        "epoch 1/2, step 3",
        "epoch 2/2, step 6",
        "epoch 2/2, step 6",
    ]
    assert "train/epoch_loss" in lines[0]
    assert "val/accuracy" in lines[1]
    trainer_of(callbacks={}).fit()
    assert capsys.readouterr().err == ""


class Slow(Callback):
    """Takes 100 s to start, 1 s each update and 10 s to end."""

    now = 0.0

    def setup(self, trainer):
        self.now += 60

    def on_fit_start(self, trainer):
        self.now += 40

    def on_update_end(self, trainer):
        self.now += 1

    def on_fit_end(self, trainer):
        self.now += 6

    def teardown(self, trainer):
        self.now += 4


def test_what_a_callback_takes_to_start_is_no_time_of_the_loop(monkeypatch):
    slow = Slow()
    monkeypatch.setattr("trainer.state.perf_counter", lambda: slow.now)
    trainer = trainer_of({"slow": slow})
    trainer.fit()
    spent = {kind: seconds for kind, seconds in trainer.timer.spent.items() if seconds}
    assert spent == {"start and end": 110, "callbacks": 6}


@pytest.mark.parametrize("place", ["auto", "directory", "file"])
def test_a_run_goes_on_where_it_was(tmp_path, place):
    whole = trainer_of({"checkpoint": Checkpoint()}, run_dir=tmp_path / "whole", max_epochs=4)
    whole.fit(resume="auto")  # there is nothing yet: it starts
    first = tmp_path / "deep" / "first"
    trainer_of({"checkpoint": Checkpoint()}, run_dir=str(first)).fit()
    resume = {"auto": "auto", "directory": first, "file": first / "checkpoints" / "last.pt"}[place]
    run_dir = first if place == "auto" else tmp_path / "second"
    later = trainer_of({"checkpoint": Checkpoint()}, run_dir=run_dir, max_epochs=4)
    later.fit(resume=resume)
    assert later.state.global_step == 12
    pairs = zip(weights(whole), weights(later), strict=True)
    assert all(torch.equal(one, other) for one, other in pairs)


def test_a_resume_that_cannot_be_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match="give Trainer one"):
        trainer_of({}).fit(resume="auto")
    with pytest.raises(CheckpointError, match="no checkpoint in it"):
        trainer_of({}).fit(resume=tmp_path)
    run = tmp_path / "run"
    trainer_of({"checkpoint": Checkpoint(save_top_k=-1)}, run_dir=run).fit()
    with pytest.raises(CheckpointError, match="later steps"):
        trainer_of({}, run_dir=run).fit(resume=run / "checkpoints" / "step-00000003.pt")


def test_a_run_directory_that_cannot_be_is_found_before_training(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError):
        trainer_of({"checkpoint": Checkpoint()}, run_dir=tmp_path / "file" / "run")


def test_checkpoints_without_a_directory_are_not_lost_in_silence(caplog):
    with caplog.at_level(logging.WARNING):
        trainer_of({"saver": Checkpoint()}).fit()
    assert "callbacks.saver saves nothing: the Trainer was given no run_dir" in caplog.text


def test_options_have_the_names_of_the_configuration():
    assert TrainerOptions is TrainerConfig
    assert TrainerOptions(max_time="1:00:30").seconds == 3630
    clipped, free = trainer_of({}, clip_grad_norm=1e-6), trainer_of({})
    before = weights(clipped)
    clipped.fit()
    free.fit()
    moved = [(a - b).abs().max().item() for a, b in zip(before, weights(clipped), strict=True)]
    assert max(moved) < 1e-5
    assert not torch.allclose(before[0], weights(free)[0], atol=1e-3)


@pytest.mark.parametrize("steps", [1, 2])
def test_a_hook_is_given_batch_and_outputs_where_it_asks(steps):
    seen = []

    class Look(Callback):
        def on_update_end(self, trainer, batch, outputs):
            seen.append((batch, outputs))

    class Other(Callback):
        def on_update_end(self, trainer):
            seen.append(None)

    trainer = trainer_of({"look": Look(), "other": Other()}, gradient_accumulation_steps=steps)
    trainer.fit()
    assert seen[1::2] == [None] * 6
    (inputs, labels), outputs = seen[0]
    assert inputs.shape == (8, 8)
    assert torch.equal(labels, trainer.train_loader._loader.dataset.tensors[1][:8])
    assert len(outputs) == steps
    assert all(isinstance(output, StepOutput) for output in outputs)


def test_nothing_is_kept_where_no_hook_asks():
    trainer = trainer_of({})
    trainer.fit()
    assert trainer.updater.last_update() == {"batch": None, "outputs": []}


def test_a_hook_with_other_parameters_is_refused():
    class Foreign(Callback):
        def on_update_end(self, trainer, batch, batch_idx):
            pass

    with pytest.raises(ModelError, match=r"'batch_idx'.*batch and outputs"):
        trainer_of({"foreign": Foreign()})


def test_a_loss_of_coupled_samples_says_that_a_split_changes_it(caplog):
    with caplog.at_level(logging.WARNING):
        trainer_of({}, Coupled(3)).fit()
        assert caplog.text == ""
        trainer_of({}, Coupled(3), gradient_accumulation_steps=2).fit()
    assert "Coupled couples the samples of a micro-batch" in caplog.text
    assert "2 micro-batches" in caplog.text


def test_overfitting_ends_near_zero_and_says_how_long_it_takes(caplog):
    overfit = Overfit(threshold=0.5)
    trainer = trainer_of({"overfit": overfit}, max_epochs=500, log_every_n_steps=1)
    with caplog.at_level(logging.INFO):
        trainer.fit()
    assert 3 < trainer.state.global_step < 1500
    assert trainer.metrics["train/loss"] <= 0.5
    assert "near zero" in trainer.state.stop_reason
    assert caplog.text.count("overfitting: 1500 updates of") == 1
    again = trainer_of({"overfit": Overfit(threshold=0.5)}, max_epochs=500, log_every_n_steps=1)
    snapshot.restore(again, snapshot.take(trainer))  # killed after a save, before the end
    again.fit()
    assert again.state.global_step == trainer.state.global_step
