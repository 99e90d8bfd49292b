"""The means of an epoch do not depend on the logging interval."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from callbacks.checkpoint import Checkpoint
from callbacks.early_stopping import EarlyStopping
from data.orders import Shuffled
from toys import SAMPLES, Log, by_hand, loader, points, trainer_of
from trainer import snapshot
from trainer.callback import Callback
from trainer.lr_schedulers.schedule import LRSchedule
from trainer.tasks.classification import Classification
from trainer.trainer import Trainer

EPOCHS = 3


def made_with(
    *,
    micro_batches: int = 1,
    bad: int | None = None,
    callbacks: dict[str, Callback] | None = None,
    scheduler: Any = None,
    validated: bool = False,
    **options: Any,
) -> tuple[Trainer, Log]:
    data, lines = points(), Log()
    if bad is not None:
        data.x[bad] = torch.nan
    options = {"max_epochs": EPOCHS, "gradient_accumulation_steps": micro_batches, **options}
    made = trainer_of(
        Classification(num_classes=3),
        data,
        micro_batches,
        momentum=0.0,
        val=loader(points()) if validated else None,
        scheduler=scheduler,
        callbacks={**(callbacks or {}), "lines": lines},
        **options,
    )
    return made, lines


def means_by_hand() -> dict[int, float]:
    """Return the mean over the samples of each epoch."""
    totals: list[float] = []

    def objective(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        loss = F.cross_entropy(model(x), y)
        totals.append(loss.item() * len(y))
        return loss

    by_hand(objective, points(), momentum=0.0, epochs=EPOCHS)
    return {3 * n: sum(totals[3 * n - 3 : 3 * n]) / SAMPLES for n in range(1, EPOCHS + 1)}


@pytest.mark.parametrize("micro_batches", [1, 3])
def test_the_mean_over_an_epochs_samples(micro_batches: int) -> None:
    made, lines = made_with(micro_batches=micro_batches, log_every_n_steps=2)
    made.fit()
    assert lines.of("train/epoch_loss") == pytest.approx(means_by_hand(), abs=1e-14)
    assert lines.of("train/loss").keys() == {2, 3, 4, 6, 8, 9}
    assert lines.of("train/loss")[3] != lines.of("train/epoch_loss")[3]


@pytest.mark.parametrize("cut", [1, 2, 3, 4])
def test_the_epoch_mean_survives_a_resume_within_the_epoch(cut: int) -> None:
    whole, expected = made_with(log_every_n_steps=2)
    whole.fit()
    first, begun = made_with(log_every_n_steps=2, max_epochs=EPOCHS)
    first.callbacks["lines"].on_log = begun.on_log  # type: ignore[method-assign]
    first.updater.apply = stopping(first, cut)  # type: ignore[method-assign]
    first.fit()
    second, rest = made_with(log_every_n_steps=2)
    snapshot.restore(second, snapshot.take(first))
    second.fit()
    key = "train/epoch_loss"
    assert begun.of(key) | rest.of(key) == expected.of(key)


def stopping(made: Trainer, step: int) -> Any:
    """Return the trainer's `apply` that asks for a stop, as a signal would, at a step."""
    apply = made.updater.apply

    def stopped(micro_batches: Any) -> bool:
        if made.state.global_step + 1 == step:
            made.state.request_stop("SIGTERM", 143)
        return apply(micro_batches)

    return stopped


def test_a_skipped_update_that_closes_an_epoch_leaves_it_its_mean() -> None:
    last = int(torch.as_tensor(Shuffled(SAMPLES, seed=1)(0)[:SAMPLES])[-1])
    made, lines = made_with(bad=last, on_nonfinite="skip", max_epochs=1, log_every_n_steps=1)
    made.fit()
    assert (made.state.global_step, made.state.skipped_updates) == (2, 1)
    losses = lines.of("train/loss")
    assert lines.of("train/epoch_loss") == {2: pytest.approx((losses[1] + losses[2]) / 2)}


def test_an_epoch_that_the_run_cuts_short_has_the_mean_so_far() -> None:
    made, lines = made_with(max_epochs=None, max_steps=5, log_every_n_steps=1)
    made.fit()
    losses = lines.of("train/loss")
    assert lines.of("train/epoch_loss")[5] == pytest.approx((losses[4] + losses[5]) / 2)


@pytest.mark.parametrize("every", [1, 2, 50])
def test_early_stopping_and_the_best_look_at_the_epoch(every: int, tmp_path: Any) -> None:
    stopping = EarlyStopping("train/loss", patience=1, min_delta=0.05)
    checkpoint = Checkpoint(monitor="train/loss", save_top_k=-1)
    callbacks: dict[str, Callback] = {"stopping": stopping, "checkpoint": checkpoint}
    made, lines = made_with(callbacks=callbacks, log_every_n_steps=every, max_epochs=30)
    made.run_dir = tmp_path
    made.fit()
    means = lines.of("train/epoch_loss")
    falls = [b - a for a, b in zip(list(means.values()), list(means.values())[1:], strict=False)]
    assert all(fall < -0.05 for fall in falls[:-1])
    assert falls[-1] >= -0.05
    assert "train/epoch_loss has not improved" in str(made.state.stop_reason)
    assert checkpoint.monitor == "train/epoch_loss"
    assert checkpoint.best is not None
    assert checkpoint.best.value == min(means.values())


def plateau(monitor: str) -> Any:
    def make(optimizer: torch.optim.Optimizer) -> LRSchedule:
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(
            optimizer, "min", 0.5, patience=0, threshold=0.5
        )
        return LRSchedule.wrap(scheduler, monitor=monitor)

    return make


@pytest.mark.parametrize("monitor", ["train/loss", "train/epoch_loss"])
@pytest.mark.parametrize("validated", [True, False])
def test_a_plateau_of_training_moves_once_an_epoch(monitor: str, validated: bool) -> None:
    made, _ = made_with(scheduler=plateau(monitor), validated=validated, log_every_n_steps=1)
    made.fit()
    # No epoch halves the loss: each but the first is one without progress.
    assert list(made.learning_rates().values()) == [0.1 * 0.5 ** (EPOCHS - 1)]


def test_a_group_that_is_added_later_is_clipped_and_counts_in_the_norm() -> None:
    class Adds(Callback):
        def on_update_end(self, trainer: Trainer) -> None:
            if trainer.state.global_step == 1:
                (optimizer,) = trainer.optimizers.optimizers.values()
                optimizer.add_param_group({"params": list(trainer.model[0].parameters())})

    def run(**options: Any) -> tuple[Trainer, Log]:
        made, lines = made_with(callbacks={"adds": Adds()}, log_every_n_steps=1, **options)
        head = [*made.model[2].parameters()]
        (optimizer,) = made.optimizers.optimizers.values()
        optimizer.param_groups[0]["params"][:] = head
        return made, lines

    made, lines = run(max_epochs=1)
    norms: list[float] = []
    apply = made.optimizers.zero_grad

    def zero_grad() -> None:
        gradients = [p.grad for p in made.model.parameters() if p.grad is not None]
        norms.append(float(nn.utils.get_total_norm(gradients)))
        apply()
        made.model.zero_grad()

    made.optimizers.zero_grad = zero_grad  # type: ignore[method-assign]
    made.fit()
    logged = lines.of("train/grad_norm")
    assert logged[1] < norms[0]  # the head's alone
    assert [logged[2], logged[3]] == pytest.approx(norms[1:3], abs=1e-14)
