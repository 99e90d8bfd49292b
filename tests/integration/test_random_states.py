"""Nothing that is imported or drawn beside the training moves what the training draws."""

import pytest

from same_run import differences

# rich draws from `random` where it is first imported, which is not yet as in a fresh process.
OWN = """
import os, random, signal, sys
import torch
from torch import nn
from trainer.callback import Callback

for name in [name for name in sys.modules if name.partition(".")[0] == "rich"]:
    del sys.modules[name]


class Noisy(nn.Module):
    def __init__(self, num_classes=10):
        super().__init__()
        self.layer = nn.Linear(256, num_classes)

    def forward(self, x):
        x = x.mean(1).flatten(1)
        return self.layer(x * random.random() if self.training else x)


class Stops(Callback):
    def on_update_end(self, trainer):
        if trainer.state.global_step == int(os.environ.get("STOP_AT", 0)):
            os.kill(os.getpid(), signal.SIGTERM)


class Draws(Callback):
    def setup(self, trainer): random.random(), torch.rand(1)
    on_fit_start = on_epoch_start = on_epoch_end = on_validation_start = setup
    def on_log(self, trainer, scalars): random.random(), torch.rand(1)
    def on_fit_end(self, trainer): random.random(), torch.rand(1)
"""
JOB = [
    "experiment=resnet18",
    "model=mlp",
    "model._target_=own.Noisy",
    "transforms=basic",
    "+callbacks.stops={_target_: own.Stops}",
    "trainer.log_every_n_steps=3",
    "loader.num_workers=0",
]


@pytest.fixture
def run(train, tmp_path):
    (tmp_path / "own.py").write_text(OWN)

    def begin(name, *arguments, stop=0, code=0):
        environment = {"STOP_AT": str(stop)}
        job = [*JOB, *arguments, f"run_dir={tmp_path / name}"]
        ended = train(job, folder=tmp_path, environment=environment)
        assert ended.code == code, ended.err
        return tmp_path / name

    return begin


@pytest.mark.slow
def test_a_callback_that_imports_or_draws_changes_no_update(run):
    job = ["trainer.max_steps=8"]
    with_all = run("whole", *job)
    without = run("without", *job, "callbacks.model_summary=null")
    assert differences(with_all, without, but=["config"]) == []
    drawing = run("drawing", *job, "+callbacks.draws={_target_: own.Draws}")
    assert differences(with_all, drawing, but=["config"]) == []


@pytest.mark.slow
def test_two_stops_change_nothing_where_the_end_imports(run):
    job = ["callbacks=[default,pruning]", "trainer.max_steps=12"]
    whole = run("whole", *job)
    run("stopped", *job, stop=4, code=143)
    run("stopped", *job, "resume=auto", stop=8, code=143)
    assert differences(whole, run("stopped", *job, "resume=auto")) == []
