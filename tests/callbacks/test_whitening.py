"""Whitening: uncorrelated outputs of variance 1, from the data, once."""

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from callbacks.support.errors import CallbackError
from callbacks.whitening import Whitening
from trainer.options import TrainerOptions
from trainer.tasks.classification import Classification
from trainer.trainer import Trainer


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
