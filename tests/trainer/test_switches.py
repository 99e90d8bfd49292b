"""Memory format and compilation change how fast a model trains, not what it learns."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from trainer import rng as seed
from trainer.assembly import experiment as build
from trainer.options import TrainerOptions
from trainer.tasks.classification import Classification
from trainer.trainer import Trainer


def network() -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 4, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    return nn.Sequential(*layers, nn.Linear(4, 3)).double()


class Whole(nn.Module):
    """A model without a length, as most are and nn.Sequential is not."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = network()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


def batches() -> DataLoader:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(12, 3, 6, 6, generator=generator, dtype=torch.float64)
    y = torch.randint(3, (12,), generator=generator)
    return DataLoader(TensorDataset(x, y), batch_size=4)


@pytest.fixture
def by_hand() -> nn.Module:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for x, y in batches():
        optimizer.zero_grad()
        cross_entropy(model(x), y).backward()
        optimizer.step()
    return model


def trained(model: nn.Module, compiled: nn.Module | None = None, **options) -> nn.Module:
    Trainer(
        model,
        Classification(3),
        torch.optim.SGD(model.parameters(), lr=0.1),
        batches(),
        precision="fp64",
        options=TrainerOptions(**{"max_epochs": 1, **options}),
        compiled=compiled,
    ).fit()
    return model


def test_channels_last(by_hand: nn.Module) -> None:
    seen = []
    model = network().to(memory_format=torch.channels_last)
    model[0].register_forward_pre_hook(lambda _, args: seen.append(args[0].stride()))
    trained(model, channels_last=True)
    assert seen
    assert all(stride[1] == 1 for stride in seen)
    for a, b in zip(model.parameters(), by_hand.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-12)


def test_compiled(by_hand: nn.Module) -> None:
    model = Whole()
    calls = []

    def backend(graph, inputs):
        calls.append(graph)
        return graph.forward

    trained(model, compiled=torch.compile(model, backend=backend))
    assert calls
    for a, b in zip(model.parameters(), by_hand.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-12)


@pytest.mark.parametrize(("options", "dynamic"), [({}, False), ({"dynamic": None}, True)])
def test_each_shape_is_compiled_by_itself(options: dict[str, Any], dynamic: bool) -> None:
    """Torch's own choice would make a resumed run's kernels depend on the shapes it has met."""
    torch._dynamo.reset()
    symbols = []

    def backend(graph, inputs):
        symbols.append(any(isinstance(value, torch.SymInt) for value in inputs))
        return graph.forward

    model = build._compile(Whole(), {"backend": backend, **options})
    for size in (4, 3, 4):
        model(torch.zeros(size, 3, 6, 6, dtype=torch.float64))
    assert symbols == [False, dynamic]


@pytest.mark.parametrize("tf32", [False, True])
def test_the_older_tf32_switches_can_be_read_as_well(tf32: bool) -> None:
    before = (torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32)
    try:
        for value in (not tf32, tf32):
            seed.set_switches(deterministic=False, cudnn_benchmark=False, tf32=value)
        assert torch.backends.cuda.matmul.allow_tf32 is tf32
        assert torch.backends.cudnn.allow_tf32 is tf32
        assert torch.get_float32_matmul_precision() == ("high" if tf32 else "highest")
        with torch.backends.cudnn.flags(enabled=False):
            assert not torch.backends.cudnn.enabled
        assert (torch.backends.cuda.matmul.fp32_precision == "tf32") is tf32
        assert (torch.backends.cudnn.conv.fp32_precision == "tf32") is tf32  # type: ignore[attr-defined]
        assert torch.backends.mkldnn.matmul.fp32_precision == "none"  # type: ignore[attr-defined]
    finally:
        torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = before


@pytest.mark.parametrize(
    ("precision", "tf32", "device", "told"),
    [
        pytest.param("fp32", False, "cuda", True, id="convolutions are slower than torch's"),
        pytest.param("fp32", True, "cuda", False, id="as torch's"),
        pytest.param("bf16", False, "cuda", False, id="another format"),
        pytest.param("fp32", False, "cpu", False, id="no TF32 on a CPU"),
    ],
)
def test_a_run_says_where_it_is_more_exact_than_torch(
    precision: str, tf32: bool, device: str, told: bool
) -> None:
    remark = seed.tf32_remark(precision, tf32, torch.device(device))
    assert (remark is not None and "convolutions in IEEE" in remark) is told
