"""The project in examples/airbench: it runs from the clone's root; its network, its whitening."""

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from callbacks.support import CallbackError
from conf.check import parse
from examples.airbench.network import Airbench
from examples.airbench.whitening import Whitening
from scripts.composition.compose import compose
from trainer.assembly.check import check_targets
from trainer.optimizers.optimizers import build_optimizers
from trainer.options import TrainerOptions
from trainer.tasks.classification import Classification
from trainer.trainer import Trainer

ROOT = Path(__file__).resolve().parents[2]
CONF = ROOT / "examples" / "airbench" / "conf"
OURS = ["--config-dir", "examples/airbench/conf"]

SMALL = [
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
    places = [f"data.root={digit_photographs}", f"run_dir={tmp_path / 'run'}"]
    run = train([*OURS, f"experiment={experiment}", *SMALL, *places], folder=ROOT)
    assert run.code == 0, run.err
    text = (tmp_path / "run/metrics.jsonl").read_text()
    lines = [json.loads(line) for line in text.splitlines()]
    losses = [line["train/epoch_loss"] for line in lines if "train/epoch_loss" in line]
    assert losses[-1] < losses[0]
    assert {"val/accuracy", "test/accuracy"} <= {key for line in lines for key in line}
    weights = torch.load(tmp_path / "run/checkpoints/last.pt", weights_only=True)["model"]
    assert torch.equal(weights["whiten.weight"][:12], -weights["whiten.weight"][12:])
    assert weights["whiten.bias"].abs().min() > 0


@pytest.mark.parametrize(
    "path", sorted(CONF.rglob("*.yaml")), ids=lambda path: str(path.relative_to(CONF))
)
def test_a_file_opens_with_its_command_and_its_targets_bind(path: Path) -> None:
    command = path.read_text(encoding="utf-8").partition("\n")[0].removeprefix("# train ")
    composed = compose([*command.replace("'", "").split(), "data.root=images"])
    check_targets(parse(composed.config))


@pytest.mark.parametrize(
    ("channels", "side"),
    [
        pytest.param(3, 32, id="cifar"),
        pytest.param(1, 16, id="digits"),
        pytest.param(3, 40, id="larger"),
    ],
)
def test_logits_and_gradients(channels: int, side: int) -> None:
    model = Airbench(10, channels, widths=(8, 16, 16))
    out = model(torch.randn(4, channels, side, side))
    assert out.shape == (4, 10)
    out.square().sum().backward()
    idle = {name for name, p in model.named_parameters() if p.grad is None}
    norms = {f"groups.{g}.norm{n}.weight" for g in range(3) for n in (1, 2)}
    assert idle == {"whiten.weight", *norms}
    assert idle == {name for name, p in model.named_parameters() if not p.requires_grad}


def test_convolutions_begin_by_handing_on_their_input() -> None:
    layer = Airbench(10, widths=(32, 64, 64)).groups[1].conv1  # type: ignore[union-attr]
    assert isinstance(layer, nn.Conv2d)
    images = torch.randn(2, 32, 8, 8)
    torch.testing.assert_close(layer(images)[:, :32], images)


def test_all_is_trained_by_one_optimizer_or_the_other() -> None:
    config = parse(compose([*OURS, "experiment=airbench94"]).config)
    model = Airbench(10, widths=(8, 16, 16))
    optimizers = build_optimizers(model, config.optimizer)
    groups = {
        group.name: ({optimizers.names[p] for p in group.options["params"]}, group.options["lr"])
        for group in optimizers.groups()
    }
    kernels = {f"groups.{g}.conv{n}.weight" for g in range(3) for n in (1, 2)}
    biases = {f"groups.{g}.norm{n}.bias" for g in range(3) for n in (1, 2)}
    assert groups == {
        "muon": (kernels, 0.24),
        "sgd.head": ({"head.weight"}, 1340.0),
        "sgd": ({"whiten.bias", *biases}, 106.0),
    }


def _images(samples: int = 256) -> Tensor:
    """Return images whose neighbouring pixels and channels are alike."""
    drawn = torch.randn(samples, 2, 8, 8, generator=torch.Generator().manual_seed(0))
    return drawn.cumsum(2).cumsum(3).cumsum(1) * 0.1


def _model(filters: int = 16) -> nn.Sequential:
    torch.manual_seed(1)
    layers = [nn.Conv2d(2, filters, 2), nn.ReLU(), nn.Flatten(), nn.Linear(filters * 49, 3)]
    model = nn.Sequential(*layers)
    model[0].weight.requires_grad_(False)
    return model


def _trainer(
    model: nn.Module, whitening: Whitening, epochs: int = 1, micro_batches: int = 1
) -> Trainer:
    images = _images()
    data = TensorDataset(images, torch.arange(len(images)) % 3)
    trained = [p for p in model.parameters() if p.requires_grad]
    return Trainer(
        model,
        Classification(3),
        torch.optim.SGD(trained, lr=0.1),
        DataLoader(data, batch_size=32),
        callbacks={"whitening": whitening},
        options=TrainerOptions(max_epochs=epochs, gradient_accumulation_steps=micro_batches),
    )


def test_outputs_are_uncorrelated_and_of_variance_one() -> None:
    model = _model()
    _trainer(model, Whitening("0", samples=256, eps=1e-8)).fit()
    model[0].bias.detach().zero_()
    outputs = model[0](_images()).transpose(0, 1).flatten(1)
    moments = outputs @ outputs.T / outputs.shape[1]
    torch.testing.assert_close(moments[:8, :8], torch.eye(8), rtol=0, atol=1e-3)
    assert torch.equal(model[0].weight[:8], -model[0].weight[8:])


def test_the_bias_is_trained_in_the_first_epochs() -> None:
    seen: list[Tensor] = []

    class Watched(Whitening):
        def on_epoch_start(self, trainer: Trainer) -> None:
            super().on_epoch_start(trainer)
            seen.append(self._layer(trainer).bias.detach().clone())

    model = _model()
    _trainer(model, Watched("0", bias_epochs=0.5), epochs=4).fit()
    assert torch.equal(seen[0], torch.zeros(16))
    assert not torch.equal(seen[1], seen[2])
    assert torch.equal(seen[2], seen[3])
    assert torch.equal(seen[3], model[0].bias)


def test_a_resumed_run_keeps_its_filters() -> None:
    model = _model()
    before = model[0].weight.clone()
    trainer = _trainer(model, Whitening("0"))
    trainer.resumed = True
    trainer.fit()
    assert torch.equal(model[0].weight, before)


@pytest.mark.parametrize(
    ("module", "filters", "text"),
    [
        pytest.param("stem", 16, "no convolution of the model; it has 0", id="no-such-layer"),
        pytest.param("3", 16, "no convolution", id="no-convolution"),
        pytest.param("0", 12, "0 has 12 filters; patches of 8 numbers require 16", id="filters"),
    ],
)
def test_a_layer_that_cannot_be_whitened_is_told(module: str, filters: int, text: str) -> None:
    with pytest.raises(CallbackError, match=text):
        Whitening(module).check(_model(filters))


def test_the_moments_do_not_depend_on_the_split_of_an_update() -> None:
    weights = []
    for steps in (1, 4):
        model = _model()
        trainer = _trainer(model, Whitening("0", samples=100), micro_batches=steps)
        trainer.setup()
        trainer.callbacks["whitening"].on_fit_start(trainer)
        weights.append(model[0].weight.detach().clone())
    torch.testing.assert_close(*weights)
