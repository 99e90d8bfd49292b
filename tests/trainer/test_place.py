"""A run that goes on with another batch size, or with data that grew or shrank."""

from itertools import chain
from typing import Any

import numpy as np
import pytest
import torch

from regimen.data.loading.loader import Loader
from regimen.data.orders import Shuffled
from regimen.data.samplers import UpdateSampler
from regimen.trainer.callback import Callback
from regimen.trainer.lr_schedulers.build import build_lr_schedule
from regimen.trainer.optimizers.optimizers import build_optimizers
from regimen.trainer.options import TrainerOptions
from regimen.trainer.tasks.classification import Classification
from regimen.trainer.trainer import Trainer
from schedules_by_hand import node
from toys import Samples, StopAt, network, points, through_a_file

EPOCHS = 4


class Seen(Callback):
    """Keep the samples and the learning rate of each update."""

    def __init__(self) -> None:
        self.samples: list[list[int]] = []
        self.rates: list[float] = []

    def on_update_start(self, trainer: Trainer, micro_batches: Any) -> None:
        """Note them."""
        self.samples.append([i for m in micro_batches for i in m.batch_slice.indices])
        self.rates.append(next(iter(trainer.learning_rates().values())))


def trainer_of(
    samples: int,
    batch: int,
    stop: int | None = None,
    scheduler: str = "cosine",
    drop_last: bool = False,
    **options: Any,
) -> tuple[Trainer, Seen]:
    data: Samples = points(samples)
    sampler = UpdateSampler(Shuffled(samples, seed=1), batch_size=batch, drop_last=drop_last)
    model = network()
    optimizers = build_optimizers(model, {"_target_": "torch.optim.SGD", "lr": 0.1})
    given = TrainerOptions(**{"max_epochs": EPOCHS, **options})
    per_epoch = len(sampler)
    total = per_epoch * EPOCHS if given.max_steps is None else given.max_steps
    schedule = build_lr_schedule(node(scheduler), optimizers, total, per_epoch)
    seen = Seen()
    trainer = Trainer(
        model,
        Classification(3),
        optimizers,
        Loader(data, sampler, seed=1),
        lr_scheduler=schedule,
        callbacks={"seen": seen, "stop": StopAt(stop)},
        options=given,
        precision="fp64",
    )
    return trainer, seen


def resumed(begun: Trainer, *given: Any, exact: bool = True, **options: Any) -> Any:
    trainer, seen = trainer_of(*given, **options)
    notes = trainer.load_state_dict(through_a_file(begun.state_dict()), exact)
    return trainer, seen, notes


@pytest.mark.parametrize("scheduler", ["cosine", "one_cycle", "linear"])
@pytest.mark.parametrize(
    ("old", "new", "stop"),
    [
        pytest.param(8, 16, 10, id="larger, at an update of the new size"),
        pytest.param(8, 16, 9, id="larger, in the middle of one"),
        pytest.param(8, 3, 9, id="smaller"),
        pytest.param(8, 100, 9, id="an epoch in one update"),
        pytest.param(16, 8, 5, id="at the end of an epoch"),
    ],
)
def test_another_batch_size_goes_on_behind_the_samples_that_were_seen(scheduler, old, new, stop):
    samples = 40
    begun, before = trainer_of(samples, old, stop, scheduler=scheduler)
    begun.fit()
    trainer, seen, notes = resumed(begun, samples, new, exact=False, scheduler=scheduler)
    assert f"loader.batch_size: {old} -> {new}" in notes[0]
    trainer.fit()
    drawn = np.concatenate([*map(np.array, before.samples), *map(np.array, seen.samples)])
    wanted = np.concatenate([Shuffled(samples, 1)(epoch) for epoch in range(EPOCHS)])
    assert drawn.tolist() == wanted.tolist()  # each once an epoch, in the run's order
    whole, rates = trainer_of(samples, new, scheduler=scheduler)
    whole.fit()
    assert seen.rates == pytest.approx(rates.rates[-len(seen.rates) :])  # the rest of that curve
    assert trainer.state.samples == EPOCHS * samples


@pytest.mark.parametrize("scheduler", ["cosine", "one_cycle", "step", "constant"])
@pytest.mark.parametrize("now", [24, 56, 8])
def test_data_that_grew_or_shrank_go_on_by_their_new_length(scheduler, now):
    begun, before = trainer_of(40, 8, 8, scheduler=scheduler)  # 24 samples of the second epoch
    begun.fit()
    trainer, seen, notes = resumed(begun, now, 8, scheduler=scheduler)
    assert f"samples of an epoch: 40 -> {now}" in notes[0]
    trainer.fit()
    assert (trainer.state.epoch, before.samples != []) == (EPOCHS, True)
    whole, rates = trainer_of(now, 8, scheduler=scheduler)
    whole.fit()
    assert seen.rates == pytest.approx(rates.rates[len(rates.rates) - len(seen.rates) :])
    rest = Shuffled(now, 1)(1)[24:].tolist()
    assert list(chain(*seen.samples))[: len(rest)] == rest


@pytest.mark.parametrize("drop_last", [False, True])
def test_the_place_is_found_again_by_the_next_resume_in_the_same_epoch(drop_last):
    first, _ = trainer_of(40, 8, 3, drop_last=drop_last)
    first.fit()
    second, seen, _ = resumed(first, 40, 6, exact=False, drop_last=drop_last)
    second.callbacks["stop"].update = 5
    second.fit()
    third, last, notes = resumed(second, 40, 6, drop_last=drop_last)
    assert notes == []
    third.fit()
    order = Shuffled(40, 1)(0)[24:].tolist()
    drawn = list(chain(*seen.samples, *last.samples))
    left = order[: len(order) // 6 * 6] if drop_last else order
    assert drawn[: len(left)] == left
    assert drawn[len(left)] == Shuffled(40, 1)(1)[0]


def test_a_run_of_a_number_of_updates_keeps_its_place_in_the_curve():
    begun, _ = trainer_of(40, 8, 10, max_steps=20, max_epochs=None)
    begun.fit()
    trainer, seen, _ = resumed(begun, 40, 16, exact=False, max_steps=20, max_epochs=None)
    trainer.fit()
    whole, rates = trainer_of(40, 16, max_steps=20, max_epochs=None)
    whole.fit()
    assert seen.rates == pytest.approx(rates.rates[10:])


def test_a_checkpoint_of_an_earlier_version_goes_on_at_its_update():
    begun, _ = trainer_of(40, 8, 8)
    begun.fit()
    payload = through_a_file(begun.state_dict())
    del payload["state"]["lengths"], payload["state"]["counters"]["epoch_samples"]
    trainer, seen = trainer_of(40, 8)
    assert trainer.load_state_dict(payload) == []
    trainer.fit()
    assert list(chain(*seen.samples))[:16] == Shuffled(40, 1)(1)[24:].tolist()
    assert torch.tensor(seen.rates).isfinite().all()
