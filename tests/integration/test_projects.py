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
    *("--config-dir", "conf", "experiment=mine", "trainer.log_every_n_steps=2"),
    "+transforms.train.jitter={_target_: mine.Jitter}",
    *("callbacks.checkpoint.every_n_steps=20", "callbacks.checkpoint.save_top_k=-1"),
]


def test_a_new_project_trains_and_workers_and_a_resume_change_nothing(train, tmp_path):
    project = shutil.copytree(ROOT / "template", tmp_path / "new")
    (project / "mine.py").write_text((project / "mine.py").read_text() + JITTER)
    whole = project / "whole"
    train([*NEW, "run_dir=whole"], folder=project)
    last = {k: v for line in logged(whole) for k, v in line.items()}
    assert last["val/accuracy"] > 0.8
    train(["run=whole"], folder=project, command="evaluate")
    again = json.loads((whole / "evaluation.json").read_text())
    assert again["test/accuracy"] == last["test/accuracy"]

    copy = shutil.copytree(whole, project / "copy")
    step = copy / "checkpoints" / "step-00000020.pt"
    train([*NEW, "loader.num_workers=2", f"resume={step}"], folder=project)
    assert differences(whole, copy, but=["config"]) == []
    assert (copy / "diary.txt").read_text() == (whole / "diary.txt").read_text()


# examples/airbench
CONF = ROOT / "examples" / "airbench" / "conf"
OURS = ["--config-dir", "examples/airbench/conf"]
SMALL_PICTURES = [
    *("data=cifar10_folder", "data.val_fraction=0.1", "model.widths=[8,16,16]"),
    *("loader.batch_size=30", "trainer.max_epochs=3", "trainer.compile=false"),
    "callbacks.whitening.samples=60",
]


@pytest.mark.parametrize("experiment", ["cifar10_fast", "airbench94"])
def test_a_recipe_trains_on_a_cpu(train, digit_photographs, tmp_path, experiment):
    places = [f"data.root={digit_photographs}", f"run_dir={tmp_path / 'run'}"]
    train([*OURS, f"experiment={experiment}", *SMALL_PICTURES, *places], folder=ROOT)
    lines = logged(tmp_path / "run")
    losses = [line["train/epoch_loss"] for line in lines if "train/epoch_loss" in line]
    assert losses[-1] < losses[0]
    assert {"val/accuracy", "test/accuracy"} <= {key for line in lines for key in line}
    weights = torch.load(tmp_path / "run/checkpoints/last.pt", weights_only=True)["model"]
    assert torch.equal(weights["whiten.weight"][:12], -weights["whiten.weight"][12:])
    assert weights["whiten.bias"].abs().min() > 0


@pytest.mark.parametrize(
    "path", sorted(CONF.rglob("*.yaml")), ids=lambda path: str(path.relative_to(CONF))
)
def test_a_file_opens_with_its_command_and_its_targets_bind(path):
    command = path.read_text(encoding="utf-8").partition("\n")[0].removeprefix("# train ")
    composed = compose([*command.replace("'", "").split(), "data.root=images"])
    check_targets(parse(composed.config))


class Watched(Whitening):
    """Whitening that notes its layer's bias at the start of each epoch."""

    def on_epoch_start(self, trainer):
        super().on_epoch_start(trainer)
        self.seen = [*getattr(self, "seen", ()), self._layer(trainer).bias.detach().clone()]


def whitened(epochs=1, resumed=False, **options):
    """Train; return the first layer, the images, its biases and its filters before."""
    # Neighbouring pixels and channels are alike.
    drawn = torch.randn(256, 2, 8, 8, generator=torch.Generator().manual_seed(0))
    images = drawn.cumsum(2).cumsum(3).cumsum(1).double() * 0.1
    torch.manual_seed(1)
    layer = nn.Conv2d(2, 16, 2).double()
    layer.weight.requires_grad_(False)
    model = nn.Sequential(layer, nn.ReLU(), nn.Flatten(), nn.Linear(16 * 49, 3))
    before = layer.weight.clone()
    data = DataLoader(TensorDataset(images, torch.arange(256) % 3), batch_size=32)
    more = {"callbacks": {"whitening": Watched("0", **options)}, "max_epochs": epochs}
    trainer = toys.trainer_of(Classification(3), data, model=model, **more)
    trainer.state.resumed = resumed
    trainer.fit()
    return layer, images, trainer.callbacks["whitening"].seen, before


def test_outputs_are_uncorrelated_and_of_variance_one():
    layer, images, *_ = whitened(samples=256, eps=1e-8)
    layer.bias.detach().zero_()
    outputs = layer(images).transpose(0, 1).flatten(1)
    moments = outputs @ outputs.T / outputs.shape[1]
    torch.testing.assert_close(moments[:8, :8], torch.eye(8).double(), rtol=0, atol=1e-3)
    assert torch.equal(layer.weight[:8], -layer.weight[8:])


def test_the_bias_is_trained_in_the_first_epochs_and_a_resume_keeps_the_filters():
    layer, _, seen, _ = whitened(epochs=4, bias_epochs=0.5)
    assert not seen[0].any()
    assert not torch.equal(seen[1], seen[2])
    assert torch.equal(seen[2], seen[3])
    assert torch.equal(seen[3], layer.bias)
    layer, _, _, before = whitened(resumed=True)
    assert torch.equal(layer.weight, before)
