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

N, SEED, EPOCHS = 23, 3, 3
X = torch.randn(N, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
Y = X[:, :3].argmax(1)
FORMS = {
    "tensors": lambda: (X, Y),
    "arrays": lambda: (X.numpy(), Y.numpy()),
    "small_integers": lambda: (X.numpy(), Y.numpy().astype(np.int8)),
    "lists": lambda: (X.tolist(), Y.tolist()),
    "backwards": lambda: (X.numpy()[::-1][::-1].astype(">f8"), Y.numpy()),
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
    parts = {"callbacks": callbacks or {}, "run_dir": run_dir, "options": options, **more}
    return Trainer(model, Classification(3), optimizer, train, **parts)


def by_hand(size, epochs=EPOCHS):
    """Train on whole batches, in the order that (seed, epoch) give."""
    model, order = network(), Shuffled(N, SEED)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for epoch in range(epochs):
        for rows in torch.from_numpy(order(epoch)).split(size):
            optimizer.zero_grad()
            cross_entropy(model(X[rows]), Y[rows]).backward()
            optimizer.step()
    return model


def assert_near(one, other):
    for a, b in zip(one.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-13)


def rows_of(loader, epoch=0):
    return [micro.batch_slice.indices for micro in loader.epoch(epoch)]


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
        saver = {"checkpoint": Checkpoint(every_n_steps=1)}
        trainer = trainer_of(loader, 2, run_dir=folder, callbacks={**callbacks, **saver})
        trainer.fit(resume=resume)
        return trainer

    whole = run(tmp_path / "whole")
    assert run(tmp_path / "cut", stop=StopAt(stop)).state.global_step == stop
    later = run(tmp_path / "cut", resume="auto")
    assert later.resumed
    assert later.state.global_step == whole.state.global_step
    pairs = zip(whole.model.parameters(), later.model.parameters(), strict=True)
    assert all(torch.equal(one, other) for one, other in pairs)
    assert later.metrics["train/epoch_loss"] == whole.metrics["train/epoch_loss"]


def test_one_loader_serves_several_trainers():
    """Each has its own split, and its own place in the epoch."""
    loader = regimen.loader(X, Y, batch_size=8, seed=SEED)
    one, four = trainer_of(loader), trainer_of(loader, 4)
    four.fit()
    one.fit()
    assert one.state.micro_batches == EPOCHS * 3
    assert_near(one.model, four.model)
    assert len(rows_of(loader)) == 3


def test_numbers_become_the_model_s_type_and_lose_nothing_before():
    loader = regimen.loader(X.numpy(), Y.numpy(), batch_size=8, seed=SEED)
    narrow = trainer_of(loader, model=network(torch.float32), val_loader=loader)
    narrow.fit()
    assert next(narrow.draw(0))[0].batch[0].dtype == torch.float32
    assert torch.equal(next(trainer_of(loader).draw(0))[0].batch[0], X[Shuffled(N, SEED)(0)[:8]])
    assert next(loader.epoch(0)).batch[0].dtype == torch.get_default_dtype()


@pytest.mark.quick
def test_a_validation_counts_each_sample_once():
    loader = regimen.loader(X, Y, batch_size=5, shuffle=False)
    trainer = trainer_of(loader, 4, val_loader=loader)
    found = trainer.evaluate(loader, "val")
    with torch.no_grad():
        output = trainer.model(X)
    assert found["val/loss"] == pytest.approx(float(cross_entropy(output, Y)), rel=1e-12)
    assert found["val/accuracy"] == pytest.approx(float((output.argmax(1) == Y).double().mean()))


def share_of_a_process(strategy):
    """Return what a process trains on, and what all of them find in an evaluation."""
    loader = regimen.loader(X, Y, batch_size=8, seed=SEED)
    trainer = trainer_of(loader, 2, strategy=strategy, model=strategy.prepare(network()))
    counts = [m.batch_slice.count for m in trainer.train_loader.epoch(0)]
    others = regimen.loader(X, Y, batch_size=8, shuffle=False)
    return counts, trainer.evaluate(others, "val")["val/loss"]


def test_two_processes_share_an_update(ranks):
    found = ranks(2, in_group(share_of_a_process, DDP))
    assert [counts for counts, _ in found] == [[2, 2, 2, 2, 2, 2], [2, 2, 2, 2, 2, 1]]
    with torch.no_grad():
        loss = float(cross_entropy(network()(X), Y))
    assert [value for _, value in found] == pytest.approx([loss, loss], rel=1e-12)


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
    batch, labels = next(loader.epoch(0)).batch
    assert batch["a"].dtype == torch.float32
    assert batch["b"].tolist() == list(range(8))
    assert torch.equal(labels, Y[:8])
    alone = next(regimen.loader(X, batch_size=8, shuffle=False).epoch(0)).batch
    assert torch.equal(alone, X[:8].float())


def test_a_sampler_a_collate_function_and_an_order_of_one_s_own():
    drawn = RandomSampler(range(N), replacement=True, num_samples=16)
    loader = regimen.loader(X, Y, batch_size=8, sampler=drawn, seed=SEED)
    assert rows_of(loader, 2) == rows_of(loader, 2) != rows_of(loader, 1)
    assert sum(map(len, rows_of(loader))) == 16
    samples = regimen.loader(X, Y, batch_size=8).dataset
    balanced = regimen.loader(X, Y, batch_size=8, sampler=ClassBalanced(samples, SEED))
    assert len(balanced) == 3
    rows = regimen.loader(X, Y, batch_size=8, shuffle=False, collate_fn=list)
    assert [int(label) for _, label in next(rows.epoch(0)).batch] == Y[:8].tolist()


def frame(**columns):
    return pytest.importorskip("pandas").DataFrame(columns)


def test_a_data_frame_is_a_table_of_numbers():
    table = frame(size=np.arange(6), price=np.linspace(0, 1, 6), new=[True, False] * 3)
    target = table.pop("new")  # of the type bool
    batch, labels = next(regimen.loader(table, target, batch_size=6, shuffle=False).epoch(0)).batch
    assert torch.equal(batch, torch.tensor(table.to_numpy(), dtype=torch.float32))
    assert labels.tolist() == [1, 0] * 3
    table["new"] = target  # beside numbers, a data frame makes objects of it
    mixed = next(regimen.loader(table, batch_size=6, shuffle=False).epoch(0)).batch
    assert mixed[:, 2].tolist() == [1.0, 0.0] * 3
    whole = next(regimen.loader(table[["size"]], batch_size=6, shuffle=False).epoch(0)).batch
    assert (whole.dtype, whole.shape) == (torch.float32, (6, 1))


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
