"""Complex parameters in every number format: no imaginary part is lost."""

import pytest
import torch
from torch import Tensor, nn

from callbacks.ema import EMA
from trainer.errors import ModelError
from trainer.options import TrainerOptions
from trainer.tasks.regression import Regression
from trainer.trainer import Trainer
from trainer.update.precision import Precision

BATCHES = 3


class Rotated(nn.Module):
    """A linear map of complex numbers, and the size of what comes out."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.weight = nn.Parameter(torch.randn(5, dtype=torch.complex64))
        self.bias = nn.Parameter(torch.zeros(()))
        self.register_buffer("phase", torch.tensor(1j))

    def forward(self, z: Tensor) -> Tensor:
        return (z * self.weight * self.phase).sum(1).abs() + self.bias


def batches() -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    draws = [torch.randn(8, 5, dtype=torch.complex64, generator=generator) for _ in range(BATCHES)]
    return [(z, z.abs().sum(1)) for z in draws]


@pytest.mark.parametrize("clip", [None, 0.05], ids=["plain", "clipped"])
@pytest.mark.parametrize("precision", ["fp32", "fp64"])
def test_training_is_the_same_as_by_hand(precision: str, clip: float | None) -> None:
    model = Rotated()
    options = TrainerOptions(max_epochs=1, clip_grad_value=clip)
    optimizer = torch.optim.Adam(Precision(precision).convert(model).parameters(), lr=0.1)
    ema = EMA(decay=0.5, warmup=False)
    Trainer(
        model,
        Regression(),
        optimizer,
        batches(),
        precision=precision,
        callbacks={"ema": ema},
        options=options,
    ).fit()
    wanted = Rotated()
    if precision == "fp64":
        wanted.weight.data = wanted.weight.data.to(torch.complex128)
        wanted.bias.data = wanted.bias.data.double()
        wanted.phase = wanted.phase.to(torch.complex128)
    average = wanted.weight.detach().clone()
    adam = torch.optim.Adam(wanted.parameters(), lr=0.1)
    for z, y in batches():
        adam.zero_grad()
        z, y = z.to(wanted.weight.dtype), y.to(wanted.bias.dtype)
        nn.functional.mse_loss(wanted(z), y).backward()
        if clip is not None:
            torch.view_as_real(wanted.weight.grad).clamp_(-clip, clip)
            wanted.bias.grad.clamp_(-clip, clip)
        adam.step()
        average = 0.5 * average + 0.5 * wanted.weight.detach()
    tolerance = 1e-12 if precision == "fp64" else 1e-5
    torch.testing.assert_close(model.weight, wanted.weight, rtol=0, atol=tolerance)
    averaged = ema.state_dict()["model"]["weight"]
    torch.testing.assert_close(averaged, average, rtol=0, atol=tolerance)


def test_what_cannot_be_scaled_is_refused() -> None:
    with pytest.raises(ModelError, match="complex gradients; use fp32, bf16"):
        Precision("fp16").convert(Rotated())


def test_complex_parameters_keep_their_precision() -> None:
    model = Precision("bf16_true").convert(Rotated())
    assert [p.dtype for p in model.parameters()] == [torch.complex64, torch.bfloat16]
    assert torch.equal(model.weight, Rotated().weight)
