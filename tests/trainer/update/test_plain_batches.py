"""A plain DataLoader: its order follows (seed, epoch), and a resume sees exactly what was left."""

import copy
import logging
import re
from itertools import islice
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from regimen.callbacks.checkpoint import Checkpoint
from regimen.trainer.callback import Callback
from regimen.trainer.components.sources import PlainBatches
from regimen.trainer.errors import UserCodeError
from regimen.trainer.options import TrainerOptions
from regimen.trainer.rng import derived_seed
from regimen.trainer.task import Task
from regimen.trainer.tasks.regression import Regression
from regimen.trainer.trainer import Trainer

SAMPLES = 22


class Numbers(Dataset[Any]):
    """Sample i holds i."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index):
        return torch.tensor([float(index)]), torch.tensor([1.0])


class Batched(Numbers):
    """Item i is a batch of its own."""

    def __getitem__(self, index):
        return torch.full((3, 1), float(index)), torch.ones(3, 1)


def jumbled(start):
    """Return all indices in an order that differs by its start."""
    return [(7 * i + start) % SAMPLES for i in range(SAMPLES)]


class Epochs:
    """A sampler of one's own that follows the epoch, as torch's DistributedSampler does."""

    epoch = 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __len__(self):
        return SAMPLES

    def __iter__(self):
        return iter(jumbled(self.epoch))


class Restless:
    """A sampler of one's own whose every pass differs."""

    passes = 0

    def __len__(self):
        return SAMPLES

    def __iter__(self):
        self.passes += 1
        return iter(jumbled(self.passes))


class Streamed(IterableDataset[Any]):
    def __iter__(self):
        return iter([Numbers()[i] for i in range(SAMPLES)])


class Own(DataLoader[Any]):
    def __iter__(self):
        return super().__iter__()


DATA = Numbers()
EXACT = {
    "shuffle": lambda: DataLoader(DATA, 4, shuffle=True),
    "drop_last": lambda: DataLoader(DATA, 4, shuffle=True, drop_last=True),
    "sequential": lambda: DataLoader(DATA, 4),
    "generator": lambda: DataLoader(DATA, 4, shuffle=True, generator=torch.Generator()),
    "replacement": lambda: DataLoader(DATA, 4, sampler=RandomSampler(DATA, True, 30)),
    "several_passes": lambda: DataLoader(DATA, 4, sampler=RandomSampler(DATA, False, 50)),
    "weighted": lambda: DataLoader(DATA, 4, sampler=WeightedRandomSampler([1.0, 2.0] * 11, 22)),
    "subset": lambda: DataLoader(DATA, 4, sampler=SubsetRandomSampler(range(3, 20))),
    "batch_sampler": lambda: DataLoader(
        DATA, batch_sampler=BatchSampler(RandomSampler(DATA), 4, drop_last=False)
    ),
    "no_batch_size": lambda: DataLoader(Batched(), batch_size=None, shuffle=True),
    "list_of_indices": lambda: DataLoader(DATA, 4, sampler=[*range(21, 0, -1)]),
    "list_of_batches": lambda: DataLoader(DATA, batch_sampler=[[1, 2], [3], [4, 9, 5]]),
    "set_epoch": lambda: DataLoader(DATA, 4, sampler=Epochs()),
    "workers": lambda: DataLoader(DATA, 4, shuffle=True, num_workers=2),
    "persistent": lambda: DataLoader(
        DATA,
        4,
        shuffle=True,
        num_workers=1,
        persistent_workers=True,
        in_order=False,
    ),
    "batches_in_a_list": lambda: [
        (torch.full((2, 1), float(i)), torch.ones(2, 1)) for i in range(5)
    ],
}
UNKNOWN = {
    "sampler": (lambda: DataLoader(DATA, 4, sampler=Restless()), "sampler .*Restless"),
    "batch_sampler": (
        lambda: DataLoader(DATA, batch_sampler=BatchSampler(Restless(), 4, False)),
        "sampler .*Restless",
    ),
    "stream": (lambda: DataLoader(Streamed(), 4), "IterableDataset .*Streamed"),
    "iterable": (lambda: {1: DATA[1], 2: DATA[2]}.values(), "dict_values"),
    "loader": (lambda: Own(DATA, 4, shuffle=True), "Own"),
}


class Seen(Callback):
    """Notes the samples of each update; may break off as Ctrl-C in a notebook does."""

    def __init__(self, until: int | None = None) -> None:
        self.until = until
        self.updates = []

    def on_update_end(self, trainer, batch):
        inputs, _ = batch
        self.updates.append(inputs.flatten().tolist())
        if trainer.state.updates == self.until:
            raise KeyboardInterrupt


def network():
    """Dropout draws from the generator that an iterator of a DataLoader draws from as well."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(1, 4), nn.Dropout(0.5), nn.Linear(4, 1))


def trainer_of(make, until=None, run_dir=None, seed=5, **more):
    model = network()
    callbacks: dict[str, Callback] = {"seen": Seen(until)}
    if run_dir is not None:
        callbacks["saver"] = Checkpoint(every_n_steps=1, save_top_k=-1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    options = TrainerOptions(max_epochs=2, seed=seed, **more)
    return Trainer(
        model,
        Regression(),
        optimizer,
        make(),
        options=options,
        callbacks=callbacks,
        run_dir=run_dir,
    )


def updates(trainer):
    return trainer.callbacks["seen"].updates


@pytest.mark.parametrize("make", [pytest.param(make, id=name) for name, make in EXACT.items()])
@pytest.mark.parametrize("place", ["same_trainer", "checkpoint"])
def test_what_is_left_of_an_epoch_is_what_was_not_seen(tmp_path, caplog, make, place):
    whole = trainer_of(make)
    with caplog.at_level(logging.WARNING):
        whole.fit()
    assert "repeats its order" not in caplog.text

    length = whole.steps_per_epoch
    stop = length + 2  # within the second epoch
    run_dir = tmp_path / "run" if place == "checkpoint" else None
    first = trainer_of(make, stop, run_dir)

    with pytest.raises(KeyboardInterrupt):
        first.fit()

    if place == "same_trainer":
        done = stop
        later = first
        later.callbacks["seen"].until = None
        later.fit()
    else:
        done = stop - 1  # in the file are the updates whose boundary was reached
        later = trainer_of(make, run_dir=run_dir)
        later.fit(resume="auto")

    left = 2 * length - done
    assert updates(first)[:done] + updates(later)[-left:] == updates(whole)
    for one, other in zip(whole.model.parameters(), later.model.parameters(), strict=True):
        assert torch.equal(one, other)


def order_by_hand(epoch):
    """Return the batches of an epoch of the seed 5."""
    generator = torch.Generator().manual_seed(derived_seed(5, "order", epoch))
    loader = DataLoader(DATA, 4, sampler=RandomSampler(DATA, generator=generator))
    return [x.flatten().tolist() for x, _ in loader]


def test_an_epoch_follows_seed_and_epoch_and_leaves_the_callers_generator_alone():
    generator = torch.Generator().manual_seed(3)
    before = generator.get_state()

    def make():
        return DataLoader(DATA, 4, shuffle=True, generator=generator)

    trainer = trainer_of(make)
    trainer.fit()
    trainer.evaluate(make(), "test")

    assert torch.equal(generator.get_state(), before)

    first = order_by_hand(0)
    second = order_by_hand(1)
    assert updates(trainer) == first + second
    assert first != second

    other = trainer_of(make, seed=6)
    other.fit()
    assert updates(other)[0] != first[0]


@pytest.mark.parametrize("workers", [0, 2])
def test_the_training_draws_what_a_loop_by_hand_does(workers):
    def make():
        return DataLoader(DATA, 4, num_workers=workers)

    trainer = trainer_of(make)
    trainer.fit()
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    for _ in range(2):
        for x, y in make():
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(x), y)
            loss.backward()
            optimizer.step()

    for one, other in zip(model.parameters(), trainer.model.parameters(), strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize(
    ("make", "named"), [pytest.param(*case, id=name) for name, case in UNKNOWN.items()]
)
def test_what_may_draw_by_itself_is_told_once_as_the_training_starts(caplog, make, named):
    trainer = trainer_of(make)
    assert caplog.text == ""

    with caplog.at_level(logging.WARNING):
        trainer.fit()
    messages = [record.getMessage() for record in caplog.records]
    (line,) = [message for message in messages if "repeats its order" in message]

    assert line.startswith("train_loader: whether ")
    assert re.search(named, line)


def numbers_of(loader, steps=1):
    """Return the numbers of the samples of the second and the third update."""
    micro_batches = PlainBatches(loader, steps).epoch(0, 1, 3)
    return [micro_batch.batch_slice.indices for micro_batch in micro_batches]


def first_two(samples):
    return torch.stack([x for x, _ in samples[:2]])


def test_the_numbers_of_samples_are_known_where_torchs_samplers_give_them():
    loader = DataLoader(DATA, 4)
    with_workers = DataLoader(DATA, 4, num_workers=1)

    assert numbers_of(loader) == [(4, 5, 6, 7), (8, 9, 10, 11)]
    assert numbers_of(loader, 2) == [(4, 5), (6, 7), (8, 9), (10, 11)]
    assert numbers_of(with_workers) == [(4, 5, 6, 7), (8, 9, 10, 11)]


@pytest.mark.parametrize(
    "loader",
    [
        pytest.param(DataLoader(DATA, 4, num_workers=1, in_order=False), id="in any order"),
        pytest.param(DataLoader(DATA, 4, collate_fn=first_two), id="fewer than were drawn"),
        pytest.param([*islice(DataLoader(DATA, 4), 4)], id="a list of batches"),
        pytest.param(
            DataLoader(Batched(), None, sampler=SequentialSampler(DATA)), id="batches as samples"
        ),
    ],
)
def test_the_numbers_of_samples_are_unknown_elsewhere(loader):
    assert numbers_of(loader) == [(), ()]


class Boxes(Dataset[Any]):
    """Sample i is an image with as many boxes as it takes to be mistaken for a batch of two."""

    def __len__(self) -> int:
        return 5

    def __getitem__(self, index):
        draws = torch.Generator().manual_seed(index)
        image = torch.randn(3, 4, 4, generator=draws, dtype=torch.float64)
        return image, {"boxes": torch.randn(2, 4, generator=draws, dtype=torch.float64)}, f"{index}"


class OfBoxes(Task):
    """The sum of a sample's boxes is to be that of its image, by a weight; one loss a sample."""

    def training_step(self, model, batch):
        if len(batch[0]) == 3 and isinstance(batch[0][1], dict):  # the samples themselves
            batch = tuple(zip(*batch, strict=True))
        images, targets, names = batch
        assert len(images) == len(targets) == len(names)
        sums = torch.stack([image.sum() for image in images])
        wanted = torch.stack([target["boxes"].sum() for target in targets])
        return (model(sums[:, None])[:, 0] - wanted) ** 2


def _stacked(samples):
    images, targets, names = zip(*samples, strict=True)
    return torch.stack(images), list(targets), list(names)


COLLATED = {
    "stacked_images": _stacked,
    "lists": lambda samples: [list(part) for part in zip(*samples, strict=True)],
    "tuples": lambda samples: tuple(zip(*samples, strict=True)),
    "samples": list,
}


@pytest.mark.parametrize("collate", [pytest.param(c, id=name) for name, c in COLLATED.items()])
@pytest.mark.parametrize("known", [True, False], ids=["loader", "batches"])
@pytest.mark.parametrize("steps", [1, 2, 3])
def test_lists_with_an_item_for_each_sample_are_split_with_the_update(collate, known, steps):
    # Batches of 3 and of 2: as many as the channels of an image, and as the boxes of a target.
    if collate is list and not known:
        pytest.skip("how many samples were asked for tells them from parts")
    loader = DataLoader(Boxes(), 3, collate_fn=collate)
    model = nn.Linear(1, 1, dtype=torch.float64)
    by_hand = copy.deepcopy(model)
    options = TrainerOptions(max_epochs=2, gradient_accumulation_steps=steps, precision="fp64")
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    given = loader if known else list(loader)
    trainer = Trainer(model, OfBoxes(), optimizer, given, options=options)
    trainer.fit()
    optimizer = torch.optim.SGD(by_hand.parameters(), lr=1e-4)
    for batch in [*loader, *loader]:
        optimizer.zero_grad()
        OfBoxes().training_step(by_hand, batch).mean().backward()
        optimizer.step()
    for one, other in zip(model.parameters(), by_hand.parameters(), strict=True):
        torch.testing.assert_close(one, other)
    with torch.no_grad():  # of batches of 3 and 2, each sample counts once
        losses = [OfBoxes().training_step(by_hand, batch) for batch in loader]
    found = trainer.evaluate(given, "test")["test/loss"]
    assert found == pytest.approx(float(torch.cat(losses).mean()))


class Bare(Dataset):
    """Samples of one form, by their numbers."""

    def __init__(self, make):
        self.make = make

    def __len__(self):
        return 11

    def __getitem__(self, index):
        return self.make(index)


def image(index):
    return torch.full((3, 4, 4 + index), float(index))  # no two of one size


BARE = {
    "pairs": lambda index: (image(index), index),
    "pairs of tensors": lambda index: (image(index), torch.tensor(index)),
    "named": lambda index: {"image": image(index), "label": index},
    "boxes": lambda index: (image(index), {"boxes": torch.zeros(index, 4)}),
    "texts": lambda index: f"text {index}",
}


@pytest.mark.parametrize("steps", [1, 2])
@pytest.mark.parametrize("size", [3, 4, 8])
@pytest.mark.parametrize("make", [pytest.param(make, id=name) for name, make in BARE.items()])
def test_a_batch_may_be_the_list_of_its_samples(make, size, steps):
    # 11 samples: last batches of 2 or 3, and batches of as many as an image has channels.
    data = Bare(make)
    found = []
    for micro_batch in PlainBatches(DataLoader(data, size, collate_fn=list), steps).epoch(0):
        batch_slice = micro_batch.batch_slice
        first = size * batch_slice.update
        assert batch_slice.total == min(size, len(data) - first)
        assert batch_slice.count == len(micro_batch.batch) == len(batch_slice.indices)
        for index, sample in zip(batch_slice.indices, micro_batch.batch, strict=True):
            assert str(sample) == str(data[index])
            found.append(index)
    assert found == list(range(len(data)))


SQUARES = {
    "two views": [torch.ones(2, 3), torch.zeros(2, 3)],
    "named views": [{"x": torch.ones(2)}, {"x": torch.zeros(2)}],
    "images and masks": (tuple(torch.ones(2, 3, 4)), tuple(torch.zeros(2, 3, 4))),
    "images and boxes": (
        tuple(torch.ones(2, 3, 4)),
        ({"boxes": torch.ones(1, 4)}, {"boxes": torch.ones(2, 4)}),
    ),
}


@pytest.mark.parametrize("name", SQUARES)
def test_parts_that_are_as_many_as_samples_stay_parts(name):
    batch = SQUARES[name]
    loader = DataLoader(range(2), 2, collate_fn=lambda _: batch)
    first, second = PlainBatches(loader, 2).epoch(0)
    for micro_batch in (first, second):
        assert micro_batch.batch_slice.count == 1
        assert len(micro_batch.batch) == 2
        for part in micro_batch.batch:
            rows = next(iter(part.values())) if isinstance(part, dict) else part
            assert len(rows) == 1


def test_lists_of_a_models_inputs_and_what_is_no_row_are_split_as_before():
    rows = torch.arange(2.0)
    batch = {"x": [rows, {"more": rows}], "y": rows, "texts": ["a", "b"], "scale": torch.tensor(3)}
    first, second = PlainBatches([batch], 2).epoch(0)
    assert [first.batch_slice.count, second.batch_slice.start] == [1, 1]
    part = second.batch
    assert [part["x"][0].tolist(), part["x"][1]["more"].tolist()] == [[1], [1]]
    assert [part["y"].tolist(), part["texts"], part["scale"].item()] == [[1], ["b"], 3]


def test_a_tensor_without_a_row_for_each_sample_is_refused():
    # The boxes of all images in one tensor, as some detectors take them.
    batch = torch.zeros(4, 3, 8, 8), torch.zeros(7, 5)
    (whole,) = PlainBatches([batch]).epoch(0)
    assert whole.batch is batch
    with pytest.raises(UserCodeError, match=r"batch of 4 samples holds a tensor \[7, 5\]"):
        list(PlainBatches([batch], 2).epoch(0))
