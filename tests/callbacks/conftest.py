"""A small regression with BatchNorm, trained by the real trainer, and what a resume is made of."""

import pytest
import torch
from tensorboard.backend.event_processing.directory_watcher import DirectoryWatcher
from tensorboard.backend.event_processing.event_file_loader import EventFileLoader
from tensorboard.backend.event_processing.io_wrapper import IsTensorFlowEventsFile
from torch import nn

from regimen.trainer.callback import Results
from regimen.trainer.task import StepOutput, Task
from toys import StopAt, through_a_file, trainer_of


class Regression(Task):
    """Mean squared error; the "accuracy" is the share of small errors."""

    def metric_names(self):
        return ["loss", "accuracy"]

    def training_step(self, model, batch):
        inputs, targets = batch
        errors = (model(inputs) - targets).square().mean(1)
        is_small = errors < 1
        return StepOutput(loss=errors, sums={"accuracy": (is_small.sum(), len(errors))})


def make_model():
    torch.manual_seed(3)
    return nn.Sequential(
        nn.Linear(4, 8),
        nn.BatchNorm1d(8),
        nn.ReLU(),
        nn.Linear(8, 2),
    ).double()


def make_batches(count, seed):
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(count, 6, 4, generator=generator, dtype=torch.float64)
    return [(x, x[:, :2] * 2 + 1) for x in inputs]


@pytest.fixture
def make_trainer():
    """Return a function that builds a trainer: 5 updates an epoch, 2 epochs."""

    def make(callbacks, run_dir=None, *, lr=0.05, validated=True, spoilt=None, **more):
        batches = make_batches(5, seed=0)
        val = make_batches(2, seed=1)
        if spoilt is not None:
            batches[spoilt][0].fill_(float("nan"))
        options = {
            "model": make_model(),
            "val": val if validated else None,
            "lr": lr,
        }
        options |= {"callbacks": callbacks, "log_every_n_steps": 2, **more}
        trainer = trainer_of(Regression(), batches, **options)
        if run_dir is not None:
            run_dir.mkdir(exist_ok=True)
        trainer.use_run_dir(run_dir)
        return trainer

    return make


@pytest.fixture
def carry_over():
    """Return a function that makes the second trainer go on where the first one is."""

    def carry(source, target):
        target.load_state_dict(through_a_file(source.state_dict()))

    return carry


@pytest.fixture
def events():
    """Return a function that reads a run's events as a TensorBoard that watches it."""

    def read(run):
        place = str(run / "tensorboard")
        return DirectoryWatcher(place, EventFileLoader, IsTensorFlowEventsFile).Load()

    return read


@pytest.fixture
def run_twice(make_trainer, tmp_path, carry_over):
    """Return a function that trains `whole`, and `cut` with an interruption and a process lost."""

    def run(make, cut):
        whole = make_trainer({"tracker": make("whole")}, tmp_path / "whole")
        whole.fit()
        whole.end(Results("finished"))

        place = tmp_path / "cut"
        first = make_trainer({"tracker": make("cut"), "stop": StopAt(cut)}, place)
        second = make_trainer({"tracker": make("cut")}, place)
        third = make_trainer({"tracker": make("cut")}, place)
        first.fit()
        first.end(Results("preempted", code=143))
        carry_over(first, second)
        carry_over(first, third)
        second.fit()  # its checkpoint is lost: that of the first one still counts
        second.end(Results("failed", code=1))
        third.fit()
        third.end(Results("finished"))

    return run
