"""Optimizers that search: what is refused with them, what they compute, and what is undone."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from toy_trees import differences
from trainer.errors import ModelError
from trainer.options import GradientNoise, TrainerOptions
from trainer.tasks.classification import Classification
from trainer.trainer import Trainer
from trainer.update import sums

UPDATES = 6  # of an epoch


def batches() -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [
        (torch.randn(8, 4, generator=generator), torch.randint(3, (8,), generator=generator))
        for _ in range(UPDATES)
    ]


@pytest.mark.parametrize(
    ("options", "precision", "key"),
    [
        pytest.param({"clip_grad_norm": 1.0}, "fp32", "trainer.clip_grad_norm", id="norm"),
        pytest.param({"clip_grad_value": 1.0}, "fp32", "clip_grad_value", id="value"),
        pytest.param(
            {"gradient_noise": GradientNoise(eta=0.1, gamma=0.5)},
            "fp32",
            "gradient_noise",
            id="noise",
        ),
        pytest.param({}, "fp16", "trainer.precision", id="fp16"),
    ],
)
def test_options_that_lbfgs_would_ignore_are_refused(
    options: dict[str, Any], precision: str, key: str
) -> None:
    model = nn.Linear(4, 3)
    with pytest.raises(ModelError, match=f"LBFGS.*{key}"):
        Trainer(
            model,
            Classification(3),
            torch.optim.LBFGS(model.parameters()),
            batches(),
            options=TrainerOptions(**options),
            precision=precision,
        )


class Counting(nn.Module):
    """Count forward passes; from the one called `bad` on, answer NaN."""

    def __init__(self, bad: int | None = None) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)
        self.calls, self._bad = 0, bad

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        lost = self._bad is not None and self.calls >= self._bad
        return torch.as_tensor(self.layer(x)) * (float("nan") if lost else 1.0)


@pytest.mark.parametrize("waits", [False, True], ids=["cpu", "as-on-a-gpu"])
def test_a_search_takes_what_was_computed_as_its_first_evaluation(
    waits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sums, "waits_for", lambda device: waits)
    torch.manual_seed(0)
    model = Counting()
    by_hand = copy.deepcopy(model.layer)
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=4)
    trainer = Trainer(model, Classification(3), optimizer, batches())
    trainer.fit()
    other, calls = torch.optim.LBFGS(by_hand.parameters(), lr=0.1, max_iter=4), 0

    for x, y in batches():

        def closure(x: Tensor = x, y: Tensor = y) -> Tensor:
            nonlocal calls
            calls += 1
            other.zero_grad()
            loss = nn.functional.cross_entropy(by_hand(x), y)
            loss.backward()
            return loss

        other.step(closure)  # type: ignore[arg-type]
    assert model.calls == calls
    for ours, theirs in zip(model.layer.parameters(), by_hand.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


def test_a_search_that_ends_in_nan_is_undone() -> None:
    torch.manual_seed(0)
    model = Counting(bad=2)  # the first evaluation is finite, the search meets NaN
    before = copy.deepcopy(model.state_dict())
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=4)
    options = TrainerOptions(max_epochs=1, on_nonfinite="skip", max_skipped_in_a_row=99)
    trainer = Trainer(model, Classification(3), optimizer, batches(), options=options)
    trainer.fit()
    assert trainer.state.skipped_updates == UPDATES
    assert differences(before, model.state_dict()) == []
    assert not optimizer.state
