"""A Trainer that a person builds in Python does what they expect from YAML."""

import logging
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import toys
from regimen.callbacks.checkpoint import Checkpoint
from regimen.conf.check import parse
from regimen.scripts.composition.compose import compose
from regimen.trainer.assembly.loaders import eval_loader, limited, overfit_samples
from regimen.trainer.callback import Callback
from regimen.trainer.components.precision import compiled_model
from regimen.trainer.errors import CheckpointError, ModelError, SampleError, StorageError
from regimen.trainer.options import TrainerOptions, count
from regimen.trainer.task import StepOutput
from regimen.trainer.tasks.classification import Classification
from regimen.trainer.tasks.regression import Regression
from toys import Samples, assert_equal, by_hand, of_output


class Coupled(Classification):
    couples_samples = True


def trainer_of(callbacks=None, task=None, run_dir=None, **options):
    torch.manual_seed(0)
    inputs = torch.randn(24, 8)
    labels = inputs[:, :3].argmax(1)
    data = DataLoader(TensorDataset(inputs, labels), batch_size=8)
    return toys.trainer_of(
        task or Classification(3),
        data,
        model=nn.Linear(8, 3),
        val=data,
        callbacks=callbacks,
        run_dir=run_dir,
        **options,
    )


def weights(trainer):
    return [p.detach().clone() for p in trainer.model.parameters()]


def test_fit_tells_each_epoch_unless_it_is_told_not_to(capsys):
    trainer_of().fit()
    lines = capsys.readouterr().err.splitlines()
    epochs = [line.partition(":")[0] for line in lines]

    assert epochs == [
        "epoch 1/2, step 3",
        "epoch 1/2, step 3",
        "epoch 2/2, step 6",
        "epoch 2/2, step 6",
    ]
    assert "train/epoch_loss" in lines[0]
    assert "val/accuracy" in lines[1]

    trainer_of(callbacks={}).fit()
    assert capsys.readouterr().err == ""


class Slow(Callback):
    """Takes a second in each of its hooks."""

    now = 0.0

    def take(self, trainer, *_):
        self.now += 1

    setup = on_fit_start = on_update_end = on_evaluation_batch = on_fit_end = teardown = take


def test_what_a_callback_takes_to_start_is_no_time_of_the_loop(monkeypatch):
    slow = Slow()
    monkeypatch.setattr("regimen.trainer.state.perf_counter", lambda: slow.now)
    trainer = trainer_of({"slow": slow})
    trainer.evaluate(trainer.val_loaders["val"], "val")  # of which the run knows nothing
    trainer.fit()
    spent = {kind: seconds for kind, seconds in trainer.timer.spent.items() if seconds}

    assert spent == {"start and end": 4, "callbacks": 6, "evaluation": 6}


@pytest.mark.parametrize("place", ["auto", "directory", "file"])
def test_a_run_goes_on_where_it_was(tmp_path, place):
    def train(run_dir, epochs, resume=None):
        callbacks = {"checkpoint": Checkpoint()}
        trainer = trainer_of(callbacks, run_dir=run_dir, max_epochs=epochs)
        trainer.fit(resume=resume)
        return trainer

    whole = train(tmp_path / "whole", 4, resume="auto")  # there is nothing yet: it starts
    first = tmp_path / "deep" / "first"
    train(str(first), 2)
    if place == "auto":
        later = train(first, 4, resume="auto")
    elif place == "directory":
        later = train(tmp_path / "second", 4, resume=first)
    else:
        later = train(tmp_path / "second", 4, resume=first / "checkpoints" / "last.pt")

    assert later.state.global_step == 12
    for one, other in zip(weights(whole), weights(later), strict=True):
        assert torch.equal(one, other)


def test_a_resume_that_cannot_be_is_refused(tmp_path):
    trainer = trainer_of({})
    with pytest.raises(CheckpointError, match="give Trainer one"):
        trainer.fit(resume="auto")
    with pytest.raises(CheckpointError, match="no checkpoint in it"):
        trainer.fit(resume=tmp_path)


def test_a_resume_before_what_the_directory_holds_is_refused(tmp_path):
    run = tmp_path / "run"
    trainer_of({"checkpoint": Checkpoint(save_top_k=-1)}, run_dir=run).fit()
    later = trainer_of({}, run_dir=run)
    with pytest.raises(CheckpointError, match="later steps"):
        later.fit(resume=run / "checkpoints" / "step-00000003.pt")


def test_a_directory_below_a_file_is_refused_before_training(tmp_path):
    file = tmp_path / "file"
    file.write_text("")
    with pytest.raises(StorageError):
        trainer_of({"checkpoint": Checkpoint()}, run_dir=file / "run")


def test_checkpoints_without_a_directory_are_not_lost_in_silence(caplog):
    with caplog.at_level(logging.WARNING):
        trainer_of({"saver": Checkpoint()}).fit()
    assert "callbacks.saver saves nothing: the Trainer was given no run_dir" in caplog.text


def test_a_time_is_written_as_a_clock_shows_it():
    assert TrainerOptions(max_time="1:00:30").seconds == 3630


@pytest.mark.parametrize("steps", [1, 2])
def test_a_hook_is_given_batch_and_outputs_where_it_asks(steps):
    seen = []

    class Look(Callback):
        def on_update_end(self, trainer, batch, outputs):
            seen.append((batch, outputs))

    trainer = trainer_of({"look": Look()}, gradient_accumulation_steps=steps)
    trainer.fit()

    _, all_labels = trainer.train_loader._loader.dataset.tensors
    (inputs, labels), outputs = seen[0]

    assert len(seen) == 6
    assert inputs.shape == (8, 8)
    assert torch.equal(labels, all_labels[:8])
    assert len(outputs) == steps
    for output in outputs:
        assert isinstance(output, StepOutput)


def test_batch_and_outputs_are_not_kept_if_no_hook_asks():
    trainer = trainer_of({})
    trainer.fit()
    assert trainer.updater.last_update() == {"batch": None, "outputs": []}


def test_a_hook_with_other_parameters_is_refused():
    class WithIndex(Callback):
        def on_update_end(self, trainer, batch, batch_idx):
            pass

    class WithoutTrainer(Callback):
        def on_update_end(self, batch):  # which would be given the trainer
            pass

    with pytest.raises(ModelError, match=r"batch and outputs: .*'batch_idx'"):
        trainer_of({"foreign": WithIndex()})
    with pytest.raises(ModelError, match=r"batch and outputs: .*'batch'"):
        trainer_of({"foreign": WithoutTrainer()})


def test_a_loss_of_coupled_samples_says_that_a_split_changes_it(caplog):
    whole = trainer_of({}, Coupled(3))
    split = trainer_of({}, Coupled(3), gradient_accumulation_steps=2)
    with caplog.at_level(logging.WARNING):
        whole.fit()
        assert caplog.text == ""
        split.fit()

    assert "Coupled couples the samples of a micro-batch" in caplog.text
    assert "2 micro-batches" in caplog.text


BATCHES = [(torch.full((4, 2), float(i)), torch.ones(4)) for i in range(3)]


class Endless(IterableDataset[Any]):
    """Samples without a number of them."""

    def __init__(self, source=None):
        self.source = source

    def __iter__(self):
        if self.source is not None:
            return self.source
        return self.samples()

    def samples(self):
        for inputs, targets in BATCHES:
            yield from zip(inputs, targets, strict=True)


def test_a_loader_without_a_length_trains_and_validates():
    loader = DataLoader(Endless(), batch_size=4)
    by_epochs = trained_on(loader, loader, max_epochs=2)
    by_steps = trained_on(loader, max_epochs=None, max_steps=7)

    assert by_epochs.state.global_step == 6
    assert by_epochs.metrics["val/loss"] >= 0
    assert by_steps.state.global_step == 7


@pytest.mark.parametrize("steps", [1, 2])
def test_an_empty_batch_is_an_update_of_no_sample(steps):
    empty = (torch.zeros(0, 2), torch.zeros(0))
    state = trained_on([BATCHES[0], empty], gradient_accumulation_steps=steps).state
    assert state.updates == 2
    assert state.samples == 4


def test_training_data_that_can_be_read_only_once_are_refused():
    with pytest.raises(TypeError, match=r"train_loader is an iterator .* only once"):
        trained_on(iter(BATCHES))
    with pytest.raises(TypeError, match="train_loader is not an iterable of batches: "):
        trained_on(3)


def test_validation_data_that_can_be_read_only_once_are_refused():
    generator = (batch for batch in BATCHES)
    with pytest.raises(TypeError, match=r"val_loader is an iterator .* only once"):
        trained_on(BATCHES, generator)
    with pytest.raises(TypeError, match="val_loader is not an iterable of batches: "):
        trained_on(BATCHES, 3)


@pytest.mark.parametrize("horizon", [{"max_epochs": 3}, {"max_epochs": None, "max_steps": 20}])
def test_an_epoch_without_batches_ends_the_training(horizon):
    once = DataLoader(Endless(iter(Endless())))
    with pytest.raises(SampleError, match="no batch in epoch 1"):
        trained_on(once, **horizon)


def trained_on(train, val=None, **options):
    given = {"max_epochs": 1, **options}
    trainer = toys.trainer_of(Regression(), train, model=nn.Linear(2, 1), val=val, **given)
    trainer.fit()
    return trainer


class Whole(nn.Module):
    """A model without a length, as most are and nn.Sequential is not."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        layers = [
            nn.Conv2d(3, 4, 3),
            nn.ReLU(),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(4, 3),
        ]
        self.layers = nn.Sequential(*layers).double()

    def forward(self, x):
        return self.layers(x)


def test_the_memory_format_changes_no_number():
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(12, 3, 6, 6, generator=generator, dtype=torch.float64)
    y = torch.randint(3, (12,), generator=generator)
    data = Samples(x, y)
    model = Whole()
    strides_of_channels = set()

    def look(layer, arguments):
        (images,) = arguments
        strides_of_channels.add(images.stride()[1])

    model.layers[0].register_forward_pre_hook(look)
    toys.trainer_of(Classification(3), data, model=model, channels_last=True).fit()

    assert strides_of_channels == {1}
    assert_equal(by_hand(of_output(cross_entropy), data, Whole()), model)


@pytest.mark.parametrize(("options", "dynamic"), [({}, False), ({"dynamic": None}, True)])
def test_each_shape_is_compiled_by_itself(options, dynamic):
    """Torch's own choice would make a resumed run's kernels depend on the shapes it has met."""
    torch._dynamo.reset()
    has_symbols = []

    def backend(graph, inputs):
        has_symbols.append(any(isinstance(value, torch.SymInt) for value in inputs))
        return graph.forward

    model = compiled_model(Whole(), {"backend": backend, **options})
    for size in (4, 3, 4):
        model(torch.zeros(size, 3, 6, 6, dtype=torch.float64))

    assert has_symbols == [False, dynamic]


def config_of(*overrides):
    composed = compose(["experiment=resnet18", "loader.batch_size=8", *overrides])
    return parse(composed.config)


class Numbers:
    def __len__(self):
        return 45  # five batches of 8, and a shorter one

    def __getitem__(self, index):
        return index


def read(config, limit, world_size, samples=None):
    """Return the samples that all processes together evaluate; none of them twice."""
    seen = []
    for rank in range(world_size):
        group = SimpleNamespace(rank=rank, data_rank=rank, data_size=world_size)
        strategy = SimpleNamespace(group=group, device=torch.device("cpu"))
        loader = eval_loader(config, Numbers(), strategy, limit, samples)
        for micro_batch in loader.epoch(0):
            counted = micro_batch.batch_slice.count
            seen += micro_batch.batch.tolist()[:counted]
    assert len(seen) == len(set(seen))
    return set(seen)


@pytest.mark.parametrize(
    ("limit", "batches"),
    [(0.28, 28), (0.29, 29), (0.57, 57), (0.58, 58), (0.145, 15), (0.004, 1), (1.0, 100), (7, 7)],
)
def test_a_fraction_is_rounded_as_it_is_written(limit, batches):
    assert count(limit, 100) == batches
    config = config_of(f"trainer.overfit_batches={limit}")
    assert overfit_samples(config, range(800)) == batches * 8
    assert limited(800, limit, config) == batches * 8


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("eval_batch_size", ["null", "5", "64"])
def test_the_samples_of_an_evaluation(eval_batch_size, world_size):
    config = config_of(f"loader.eval_batch_size={eval_batch_size}")
    for limit, samples in ((None, 45), (2, 16), (100, 45), (0.5, 24), (0.01, 8)):
        assert read(config, limit, world_size) == set(range(samples))
    assert read(config, 0.5, world_size, samples=32) == set(range(16))
