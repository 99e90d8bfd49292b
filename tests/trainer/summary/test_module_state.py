"""A probe leaves no trace in a model, whatever its modules keep beside their tensors (E3)."""

import threading

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from trainer.rng import preserved
from trainer.summary.model import summarize
from trainer.summary.module_state import kept
from trainer.update.activation_checkpointing import checkpoint_modules


class Keeping(nn.Module):
    """Keeps counters, caches and generators of its own, as people's modules do."""

    def __init__(self, on_host: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.on_host = on_host
        self.calls = 0
        self.history: list[int] = []
        self.shared = {"history": self.history}
        self.numpy = np.random.RandomState(1)
        self.generator = torch.Generator().manual_seed(1)
        self.mask: Tensor | None = None
        self.lock = threading.Lock()
        self.computed = self.linear.weight * 2  # no leaf: torch would not copy it
        self.owner = [self]

    def forward(self, x: Tensor) -> Tensor:
        assert self.owner[0] is self
        with self.lock:
            self.calls += 1
            self.history.append(self.calls)
        if self.mask is None:
            self.mask = torch.ones_like(x[0])
            self.register_buffer("cached", torch.zeros_like(x[0]), persistent=False)
        scale = self.numpy.rand() + np.random.rand()
        if self.on_host:  # what no meta tensor can do
            scale += torch.rand((), generator=self.generator).item() + float(x.sum())
            with torch.no_grad():
                self.linear.weight.clamp_(-0.1, 0.1)
        return self.linear(x * self.mask) * scale  # type: ignore[no-any-return]


def state(model: Keeping) -> object:
    inner = [m for module in model.modules() for m in vars(module) if m != "history"]
    return (
        (model.calls, list(model.history), model.mask, sorted(inner)),
        (model.numpy.get_state()[1].tolist(), model.numpy.get_state()[2]),
        model.generator.get_state().tolist(),
        np.random.get_state()[2],
        {name: value.tolist() for name, value in model.state_dict().items()},
        [name for name, _ in model.named_buffers()],
    )


@pytest.mark.parametrize("on_host", [False, True], ids=["meta", "real"])
def test_a_summary_leaves_counters_caches_and_generators_alone(on_host: bool) -> None:
    model = Keeping(on_host)
    before, held = state(model), dict(vars(model))
    summary = summarize(model, torch.randn(2, 4))
    assert summary.problem is None
    assert state(model) == before
    assert all(vars(model)[name] is value for name, value in held.items())
    out = model(torch.randn(2, 4))  # a cached mask was left behind on the meta device
    assert out.device.type == "cpu"
    assert model.shared["history"] == [1]


def test_modules_whose_forward_was_replaced_still_get_the_stand_ins() -> None:
    model = nn.Sequential(Keeping(True), nn.Linear(4, 2))
    checkpoint_modules(model, ["0"])
    before = state(model[0])  # type: ignore[arg-type]
    assert summarize(model, torch.randn(2, 4)).problem is None
    assert state(model[0]) == before  # type: ignore[arg-type]


def test_a_pass_that_fails_leaves_no_trace_either() -> None:
    model = Keeping(False)
    before = state(model)
    with pytest.raises(RuntimeError), preserved(torch.device("cpu")), kept(model):
        model(torch.randn(2, 5))
    assert state(model) == before
