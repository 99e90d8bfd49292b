"""Projects of those who use Regimen and change nothing in it: `regimen new`, and `examples/`."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import toys
from examples.airbench.whitening import Whitening
from regimen.conf.check import parse
from regimen.scripts.composition.compose import compose
from regimen.trainer.assembly.check import check_targets
from regimen.trainer.tasks.classification import Classification
from same_run import differences, logged

ROOT = Path(__file__).resolve().parents[2]

# The project that `regimen new` writes, with a transform that draws.
JITTER = """

class Jitter:
    def __call__(self, wave):
        return wave + 0.1 * torch.randn_like(wave)
"""
NEW = [
    "--config-dir",
    "conf",
    "experiment=mine",
    "trainer.log_every_n_steps=2",
    "+transforms.train.jitter={_target_: mine.Jitter}",
    "callbacks.checkpoint.every_n_steps=20",
    "callbacks.checkpoint.save_top_k=-1",
]


@pytest.fixture(scope="module")
def project(train, tmp_path_factory):
    """A new project with a transform that draws, and its run in `whole`."""
    project = shutil.copytree(ROOT / "template", tmp_path_factory.mktemp("project") / "new")
    module = project / "mine.py"
    module.write_text(module.read_text() + JITTER)
    train([*NEW, "run_dir=whole"], folder=project)
    return project


def last_logged(run):
    """Return the last value of each metric that a run logged."""
    last = {}
    for line in logged(run):
        last |= line
    return last


def test_a_new_project_trains_and_is_evaluated(train, project):
    last = last_logged(project / "whole")
    assert last["val/accuracy"] > 0.8

    train(["run=whole"], folder=project, command="evaluate")

    again = json.loads((project / "whole" / "evaluation.json").read_text())
    assert again["test/accuracy"] == last["test/accuracy"]


def test_workers_and_a_resume_change_nothing_in_a_new_project(train, project):
    whole = project / "whole"
    copy = shutil.copytree(whole, project / "copy")
    step = copy / "checkpoints" / "step-00000020.pt"

    train([*NEW, "loader.num_workers=2", f"resume={step}"], folder=project)

    assert differences(whole, copy, but=["config"]) == []
    assert (copy / "diary.txt").read_text() == (whole / "diary.txt").read_text()


# examples/airbench
CONF = ROOT / "examples" / "airbench" / "conf"
OURS = ["--config-dir", "examples/airbench/conf"]
SMALL_PICTURES = [
    "data=cifar10_folder",
    "data.val_fraction=0.1",
    "model.widths=[8,16,16]",
    "loader.batch_size=30",
    "trainer.max_epochs=3",
    "trainer.compile=false",
    "callbacks.whitening.samples=60",
]


@pytest.mark.parametrize("experiment", ["cifar10_fast", "airbench94"])
def test_a_recipe_trains_on_a_cpu(train, digit_photographs, tmp_path, experiment):
    run = tmp_path / "run"
    words = [*OURS, f"experiment={experiment}", *SMALL_PICTURES, f"data.root={digit_photographs}"]

    train([*words, f"run_dir={run}"], folder=ROOT)

    lines = logged(run)
    losses = [line["train/epoch_loss"] for line in lines if "train/epoch_loss" in line]
    assert losses[-1] < losses[0]
    assert {"val/accuracy", "test/accuracy"} <= last_logged(run).keys()
    weights = torch.load(run / "checkpoints/last.pt", weights_only=True)["model"]
    filters = weights["whiten.weight"]
    assert torch.equal(filters[:12], -filters[12:])
    assert weights["whiten.bias"].abs().min() > 0


@pytest.mark.parametrize(
    "path", sorted(CONF.rglob("*.yaml")), ids=lambda path: str(path.relative_to(CONF))
)
def test_a_file_opens_with_its_command_and_its_targets_bind(path):
    first_line, *_ = path.read_text(encoding="utf-8").splitlines()
    command = first_line.removeprefix("# train ").replace("'", "")

    composed = compose([*command.split(), "data.root=images"])

    check_targets(parse(composed.config))


class Watched(Whitening):
    """Whitening that notes its layer's bias at the start of each epoch."""

    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        self.biases = []

    def on_epoch_start(self, trainer):
        super().on_epoch_start(trainer)
        bias = self._layer(trainer).bias
        self.biases.append(bias.detach().clone())


def correlated_images():
    """Return images whose neighbouring pixels and channels are alike."""
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(256, 2, 8, 8, generator=generator)
    return noise.cumsum(2).cumsum(3).cumsum(1).double() * 0.1


def first_layer():
    torch.manual_seed(1)
    layer = nn.Conv2d(2, 16, 2).double()
    layer.weight.requires_grad_(False)
    return layer


def whiten(layer, epochs=1, resumed=False, **options):
    """Train a network with this first layer; return its bias at the start of each epoch."""
    model = nn.Sequential(layer, nn.ReLU(), nn.Flatten(), nn.Linear(16 * 49, 3))
    samples = TensorDataset(correlated_images(), torch.arange(256) % 3)
    data = DataLoader(samples, batch_size=32)
    callbacks = {"whitening": Watched("0", **options)}
    trainer = toys.trainer_of(
        Classification(3), data, model=model, callbacks=callbacks, max_epochs=epochs
    )
    trainer.state.resumed = resumed
    trainer.fit()
    return callbacks["whitening"].biases


def test_outputs_are_uncorrelated_and_of_variance_one():
    layer = first_layer()

    whiten(layer, samples=256, eps=1e-8)

    layer.bias.detach().zero_()
    outputs = layer(correlated_images()).transpose(0, 1).flatten(1)
    moments = outputs @ outputs.T / outputs.shape[1]
    torch.testing.assert_close(moments[:8, :8], torch.eye(8).double(), rtol=0, atol=1e-3)
    assert torch.equal(layer.weight[:8], -layer.weight[8:])


def test_the_bias_is_trained_in_the_first_epochs():
    layer = first_layer()

    first, second, third, fourth = whiten(layer, epochs=4, bias_epochs=0.5)

    assert not first.any()
    assert not torch.equal(second, third)
    assert torch.equal(third, fourth)
    assert torch.equal(fourth, layer.bias)


def test_a_resume_keeps_the_filters():
    layer = first_layer()
    before = layer.weight.clone()

    whiten(layer, resumed=True)

    assert torch.equal(layer.weight, before)
