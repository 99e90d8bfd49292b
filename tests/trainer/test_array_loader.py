"""`regimen.loader`: arrays, tensors, data frames and data sets train as a loop by hand, exactly."""

from collections import UserDict

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import RandomSampler, TensorDataset

import regimen
from regimen.callbacks.checkpoint import Checkpoint
from regimen.data.errors import DataError
from regimen.data.loading.loader import Loader
from regimen.data.orders import ClassBalanced, Shuffled
from regimen.data.samplers import UpdateSampler
from regimen.trainer.options import TrainerOptions
from regimen.trainer.strategies.ddp import DDP
from regimen.trainer.tasks.classification import Classification
from regimen.trainer.tasks.regression import Regression
from regimen.trainer.trainer import Trainer
from toys import StopAt, in_group

N = 23
SEED = 3
EPOCHS = 3
X = torch.randn(N, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
Y = X[:, :3].argmax(1)


def backwards(values):
    """Return the values with a negative stride, in the other order of bytes."""
    return values[::-1].astype(">f8")[::-1]


FORMS = {
    "tensors": lambda: (X, Y),
    "arrays": lambda: (X.numpy(), Y.numpy()),
    "small_integers": lambda: (X.numpy(), Y.numpy().astype(np.int8)),
    "lists": lambda: (X.tolist(), Y.tolist()),
    "backwards": lambda: (backwards(X.numpy()), Y.numpy()),
    "one_by_one": lambda: (TensorDataset(X, Y),),
    "samples": lambda: (list(zip(X, Y, strict=True)),),
}


def network(dtype=torch.float64):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).to(dtype)


def trainer_of(train, steps=1, *, run_dir=None, callbacks=None, model=None, **more):
    model = network() if model is None else model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    options = TrainerOptions(max_epochs=EPOCHS, gradient_accumulation_steps=steps)
    parts = {
        "callbacks": callbacks or {},
        "run_dir": run_dir,
        "options": options,
        **more,
    }
    return Trainer(model, Classification(3), optimizer, train, **parts)


def by_hand(size, epochs=EPOCHS):
    """Train on whole batches, in the order that (seed, epoch) give."""
    model = network()
    order = Shuffled(N, SEED)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for epoch in range(epochs):
        rows_of_epoch = torch.from_numpy(order(epoch))
        for rows in rows_of_epoch.split(size):
            optimizer.zero_grad()
            loss = cross_entropy(model(X[rows]), Y[rows])
            loss.backward()
            optimizer.step()
    return model


def assert_near(one, other):
    for a, b in zip(one.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-13)


def rows_of(loader, epoch=0):
    return [micro.batch_slice.indices for micro in loader.epoch(epoch)]


def first_batch(loader):
    return next(loader.epoch(0)).batch


@pytest.mark.parametrize("steps", [1, 4])
@pytest.mark.parametrize(
    ("form", "workers"),
    [
        *(pytest.param(make, 0, id=name) for name, make in FORMS.items()),
        pytest.param(FORMS["arrays"], 2, id="arrays-workers"),
        pytest.param(FORMS["one_by_one"], 2, id="one_by_one-workers"),
    ],
)
def test_an_update_is_that_of_a_loop_by_hand(form, steps, workers):
    loader = regimen.loader(*form(), batch_size=8, seed=SEED, num_workers=workers)
    trainer = trainer_of(loader, steps)
    trainer.fit()

    assert trainer.state.micro_batches == trainer.state.updates * steps
    assert_near(by_hand(8), trainer.model)


@pytest.mark.parametrize("workers", [pytest.param(0, id="here"), pytest.param(2, id="workers")])
@pytest.mark.parametrize("stop", [1, 4, 5])
def test_a_run_that_was_interrupted_ends_with_the_same_bits(tmp_path, stop, workers):
    def run(folder, resume=None, **callbacks):
        loader = regimen.loader(X, Y, batch_size=8, seed=SEED, num_workers=workers)
        callbacks["checkpoint"] = Checkpoint(every_n_steps=1)
        trainer = trainer_of(loader, 2, run_dir=folder, callbacks=callbacks)
        trainer.fit(resume=resume)
        return trainer

    whole = run(tmp_path / "whole")
    cut = run(tmp_path / "cut", stop=StopAt(stop))
    later = run(tmp_path / "cut", resume="auto")

    assert cut.state.global_step == stop
    assert later.resumed
    assert later.state.global_step == whole.state.global_step

    pairs = zip(whole.model.parameters(), later.model.parameters(), strict=True)
    for one, other in pairs:
        assert torch.equal(one, other)
    assert later.metrics["train/epoch_loss"] == whole.metrics["train/epoch_loss"]


def test_one_loader_serves_several_trainers():
    """Each has its own split, and its own place in the epoch."""
    loader = regimen.loader(X, Y, batch_size=8, seed=SEED)
    one = trainer_of(loader)
    four = trainer_of(loader, 4)
    four.fit()
    one.fit()

    assert one.state.micro_batches == EPOCHS * 3
    assert_near(one.model, four.model)
    assert len(rows_of(loader)) == 3


def test_numbers_become_the_model_s_type_and_lose_nothing_before():
    loader = regimen.loader(X.numpy(), Y.numpy(), batch_size=8, seed=SEED)
    narrow = trainer_of(loader, model=network(torch.float32), val_loader=loader)
    narrow.fit()
    wide = trainer_of(loader)

    def first_inputs(trainer):
        micro_batches = next(trainer.draw(0))
        inputs, _ = micro_batches[0].batch
        return inputs

    expected_rows = Shuffled(N, SEED)(0)[:8]
    inputs_of_the_loader, _ = first_batch(loader)

    assert first_inputs(narrow).dtype == torch.float32
    assert torch.equal(first_inputs(wide), X[expected_rows])
    assert inputs_of_the_loader.dtype == torch.get_default_dtype()


@pytest.mark.quick
def test_a_validation_counts_each_sample_once():
    loader = regimen.loader(X, Y, batch_size=5, shuffle=False)
    trainer = trainer_of(loader, 4, val_loader=loader)

    found = trainer.evaluate(loader, "val")

    with torch.no_grad():
        output = trainer.model(X)
    loss = cross_entropy(output, Y).item()
    accuracy = (output.argmax(1) == Y).double().mean().item()

    assert found["val/loss"] == pytest.approx(loss, rel=1e-12)
    assert found["val/accuracy"] == pytest.approx(accuracy)


def share_of_a_process(strategy):
    """Return what a process trains on, and what all of them find in an evaluation."""
    model = strategy.prepare(network())
    loader = regimen.loader(X, Y, batch_size=8, seed=SEED)
    trainer = trainer_of(loader, 2, strategy=strategy, model=model)
    counts = [micro.batch_slice.count for micro in trainer.train_loader.epoch(0)]
    others = regimen.loader(X, Y, batch_size=8, shuffle=False)
    metrics = trainer.evaluate(others, "val")
    return counts, metrics["val/loss"]


def test_two_processes_share_an_update(ranks):
    first, second = ranks(2, in_group(share_of_a_process, DDP))

    first_counts, first_loss = first
    second_counts, second_loss = second

    assert first_counts == [2, 2, 2, 2, 2, 2]
    assert second_counts == [2, 2, 2, 2, 2, 1]

    with torch.no_grad():
        loss = cross_entropy(network()(X), Y).item()
    assert first_loss == pytest.approx(loss, rel=1e-12)
    assert second_loss == pytest.approx(loss, rel=1e-12)


def test_a_split_that_the_options_contradict_is_refused():
    sampler = UpdateSampler(Shuffled(N, SEED), batch_size=8, gradient_accumulation_steps=2)
    given = Loader(TensorDataset(X, Y), sampler, seed=0)

    assert trainer_of(given).train_loader is given
    assert trainer_of(given, 2).train_loader is given
    with pytest.raises(DataError, match=r"steps=4 .* UpdateSampler was given 2: .*regimen\.loader"):
        trainer_of(given, 4)


@pytest.mark.parametrize("column", [True, False])
def test_the_values_of_a_regression_stand_in_a_column_or_not(column):
    values = X.sum(1, keepdim=True) if column else X.sum(1)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    loader = regimen.loader(X.numpy(), values.numpy(), batch_size=8)
    options = TrainerOptions(max_epochs=60)
    trainer = Trainer(model, Regression(), optimizer, loader, callbacks={}, options=options)
    trainer.fit()

    assert trainer.metrics["train/epoch_loss"] < 1e-2


def test_several_inputs_stand_in_a_dict():
    inputs = UserDict(a=X.numpy(), b=np.arange(N))
    loader = regimen.loader(inputs, Y, batch_size=8, shuffle=False, seed=SEED)
    batch, labels = first_batch(loader)

    assert batch["a"].dtype == torch.float32
    assert batch["b"].tolist() == list(range(8))
    assert torch.equal(labels, Y[:8])


def test_inputs_without_targets_stand_alone():
    loader = regimen.loader(X, batch_size=8, shuffle=False)
    assert torch.equal(first_batch(loader), X[:8].float())


def test_a_sampler_of_one_s_own_draws_anew_in_each_epoch():
    sampler = RandomSampler(range(N), replacement=True, num_samples=16)
    loader = regimen.loader(X, Y, batch_size=8, sampler=sampler, seed=SEED)
    rows = rows_of(loader, epoch=2)

    assert rows_of(loader, epoch=2) == rows
    assert rows_of(loader, epoch=1) != rows
    assert sum(len(part) for part in rows_of(loader)) == 16


def test_an_order_of_one_s_own():
    samples = regimen.loader(X, Y, batch_size=8).dataset
    order = ClassBalanced(samples, SEED)
    balanced = regimen.loader(X, Y, batch_size=8, sampler=order)
    assert len(balanced) == 3


def test_a_collate_function_of_one_s_own():
    loader = regimen.loader(X, Y, batch_size=8, shuffle=False, collate_fn=list)
    labels = [int(label) for _, label in first_batch(loader)]
    assert labels == Y[:8].tolist()


def frame(**columns):
    pandas = pytest.importorskip("pandas")
    return pandas.DataFrame(columns)


def whole_batch(*data):
    """Return all six rows of a table as one batch."""
    return first_batch(regimen.loader(*data, batch_size=6, shuffle=False))


def test_a_data_frame_is_a_table_of_numbers():
    table = frame(size=np.arange(6), price=np.linspace(0, 1, 6))
    answers = frame(new=[True, False] * 3)["new"]
    values = torch.tensor(table.to_numpy(), dtype=torch.float32)
    batch, labels = whole_batch(table, answers)

    assert torch.equal(batch, values)
    assert labels.tolist() == [1, 0] * 3


def test_a_column_of_truths_beside_numbers_becomes_numbers():
    table = frame(size=np.arange(6), new=[True, False] * 3)  # which makes objects of it
    mixed = whole_batch(table)
    assert mixed[:, 1].tolist() == [1.0, 0.0] * 3


def test_a_data_frame_of_one_column_stays_a_table():
    batch = whole_batch(frame(size=np.arange(6)))
    assert batch.dtype == torch.float32
    assert batch.shape == (6, 1)


@pytest.mark.parametrize(
    ("given", "told"),
    [
        pytest.param(lambda: (X, Y[:-1]), "X has 23 rows and y has 22", id="lengths"),
        pytest.param(lambda: ({"a": X, "b": X[1:]},), "'a': 23, 'b': 22", id="lengths_in_a_dict"),
        pytest.param(lambda: (X, ["a"] * N), "y .*holds no numbers", id="texts"),
        pytest.param(lambda: (frame(a=["x"] * N),), r"X\['a'\] .*OrdinalEncoder", id="column"),
        pytest.param(lambda: (frame(a=[1.0])[[]],), "without columns", id="no_columns"),
        pytest.param(lambda: ([[1.0], [1.0, 2.0]], [0, 1]), "X cannot be one array", id="ragged"),
        pytest.param(lambda: (np.float64(1),), "X is a single number", id="number"),
        pytest.param(lambda: (TensorDataset(X, Y), Y), "leave y out", id="data_set_and_y"),
        pytest.param(lambda: (3,), "X is a int: give an array", id="no_data"),
        pytest.param(lambda: (X[:0], Y[:0]), "no samples", id="empty"),
    ],
)
def test_what_is_no_data_is_refused_in_one_line(given, told):
    with pytest.raises(DataError, match=told):
        regimen.loader(*given(), batch_size=8)


@pytest.mark.parametrize("size", [0, -1, 2.5, None, "8"])
def test_a_batch_size_is_a_number_of_samples(size):
    with pytest.raises(DataError, match=r"batch_size=.* is no number of samples"):
        regimen.loader(X, Y, batch_size=size)
