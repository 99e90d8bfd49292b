"""A run that goes on with another batch size, or with data that grew or shrank."""

from itertools import chain
from typing import Any

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


def indices_of(micro_batches: Any) -> list[int]:
    """Return the samples of an update."""
    found: list[int] = []
    for micro_batch in micro_batches:
        found += micro_batch.batch_slice.indices
    return found


class Seen(Callback):
    """Keep the samples and the learning rate of each update."""

    def __init__(self) -> None:
        self.samples: list[list[int]] = []
        self.rates: list[float] = []

    def on_update_start(self, trainer: Trainer, micro_batches: Any) -> None:
        """Note them."""
        (rate,) = trainer.learning_rates().values()
        self.samples.append(indices_of(micro_batches))
        self.rates.append(rate)

    def all_samples(self) -> list[int]:
        """Return the samples of all updates in a row."""
        return list(chain.from_iterable(self.samples))


def order(samples: int, epoch: int) -> list[int]:
    """Return the samples of an epoch in the order of the run."""
    return Shuffled(samples, 1)(epoch).tolist()


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
    trainer.fit()
    whole, of_whole = trainer_of(samples, new, scheduler=scheduler)
    whole.fit()

    assert f"loader.batch_size: {old} -> {new}" in notes[0]

    expected = [order(samples, epoch) for epoch in range(EPOCHS)]
    drawn = before.all_samples() + seen.all_samples()
    assert drawn == list(chain(*expected))  # each once an epoch, in the run's order

    left = len(seen.rates)
    assert seen.rates == pytest.approx(of_whole.rates[-left:])  # the rest of that curve
    assert trainer.state.samples == EPOCHS * samples


@pytest.mark.parametrize("scheduler", ["cosine", "one_cycle", "step", "constant"])
@pytest.mark.parametrize("now", [24, 56, 8])
def test_data_that_grew_or_shrank_go_on_by_their_new_length(scheduler, now):
    begun, before = trainer_of(40, 8, 8, scheduler=scheduler)  # 24 samples of the second epoch
    begun.fit()
    trainer, seen, notes = resumed(begun, now, 8, scheduler=scheduler)
    trainer.fit()
    whole, of_whole = trainer_of(now, 8, scheduler=scheduler)
    whole.fit()

    assert f"samples of an epoch: 40 -> {now}" in notes[0]
    assert trainer.state.epoch == EPOCHS
    assert before.samples != []

    gone = len(of_whole.rates) - len(seen.rates)
    assert seen.rates == pytest.approx(of_whole.rates[gone:])

    rest = order(now, 1)[24:]
    assert seen.all_samples()[: len(rest)] == rest


@pytest.mark.parametrize("drop_last", [False, True])
def test_the_place_is_found_again_by_the_next_resume_in_the_same_epoch(drop_last):
    first, _ = trainer_of(40, 8, 3, drop_last=drop_last)
    first.fit()
    second, seen, _ = resumed(first, 40, 6, exact=False, drop_last=drop_last)
    second.callbacks["stop"].update = 5
    second.fit()
    third, last, notes = resumed(second, 40, 6, drop_last=drop_last)
    third.fit()

    left = order(40, 0)[24:]
    if drop_last:
        whole_batches = len(left) // 6
        left = left[: whole_batches * 6]
    drawn = seen.all_samples() + last.all_samples()

    assert notes == []
    assert drawn[: len(left)] == left
    assert drawn[len(left)] == order(40, 1)[0]


def test_a_run_of_a_number_of_updates_keeps_its_place_in_the_curve():
    length = {"max_steps": 20, "max_epochs": None}
    begun, _ = trainer_of(40, 8, 10, **length)
    begun.fit()
    trainer, seen, _ = resumed(begun, 40, 16, exact=False, **length)
    trainer.fit()
    whole, of_whole = trainer_of(40, 16, **length)
    whole.fit()

    assert seen.rates == pytest.approx(of_whole.rates[10:])


def test_a_checkpoint_of_an_earlier_version_goes_on_at_its_update():
    begun, _ = trainer_of(40, 8, 8)
    begun.fit()
    payload = through_a_file(begun.state_dict())
    del payload["state"]["lengths"]
    del payload["state"]["counters"]["epoch_samples"]
    trainer, seen = trainer_of(40, 8)
    notes = trainer.load_state_dict(payload)
    trainer.fit()

    assert notes == []
    assert seen.all_samples()[:16] == order(40, 1)[24:]
    assert torch.tensor(seen.rates).isfinite().all()
