"""Examples of sequences and tables: each as its loop by hand, and as a run that was resumed."""

import copy
import itertools
import shlex

import pytest
import torch

from examples.forecasting import by_hand as forecasting_by_hand
from examples.forecasting.data import HourlyLoad
from examples.nanogpt import by_hand as nanogpt_by_hand
from examples.sparse_embeddings import by_hand as sparse_by_hand
from examples.word_language_model import by_hand as word_by_hand
from gallery import ROOT, assert_same_state, built, check_short_resume
from regimen.conf.check import parse
from regimen.scripts.composition.compose import compose
from regimen.trainer.assembly.check import check_targets

EXAMPLES = ["word_language_model", "nanogpt", "sparse_embeddings", "forecasting"]
FILES = [path for name in EXAMPLES for path in (ROOT / "examples" / name).rglob("*.yaml")]


def batches_of(trainer, parts):
    """Train; return the batch of each update, put together from its micro-batches."""
    seen = []
    step = trainer.task.training_step

    def training_step(model, batch):
        seen.append(batch)
        return step(model, batch)

    trainer.task.training_step = training_step
    trainer.fit()
    updates = [seen[first : first + parts] for first in range(0, len(seen), parts)]
    return [tuple(torch.cat(column) for column in zip(*each, strict=True)) for each in updates]


@pytest.mark.parametrize(
    "path", sorted(FILES), ids=lambda path: str(path.relative_to(ROOT / "examples"))
)
def test_a_file_opens_with_its_command_and_its_targets_bind(path):
    first_line = path.read_text(encoding="utf-8").partition("\n")[0]
    command = shlex.split(first_line.removeprefix("# train "))
    assert command[0] == "--config-dir"
    command[1] = f"{ROOT}/{command[1]}"
    check_targets(parse(compose(command).config))


@pytest.mark.slow
@pytest.mark.parametrize("example", EXAMPLES)
def test_a_resume_from_the_middle_equals_the_whole_run(train, tmp_path, example):
    check_short_resume(train, tmp_path, example)


# examples/word_language_model
@pytest.mark.slow
@pytest.mark.parametrize("parts", [1, 4])
def test_columns_go_on_from_batch_to_batch_as_by_hand(parts):
    experiment = built(
        "word_language_model",
        *("model.width=16", "model.dropout=0", "data.columns=200", "data.eval_columns=50"),
        *("trainer.max_epochs=2", "data.shared.min_count=100"),
        f"trainer.gradient_accumulation_steps={parts}",
    )
    trainer = experiment.trainer
    model = copy.deepcopy(trainer.model)
    texts = [experiment.data.sets[split].text for split in ("train", "val")]
    trainer.fit()
    word_by_hand.train_by_hand(model, *texts, epochs=2)
    assert_same_state(trainer.model, model)
    loss = word_by_hand.mean_loss(model, texts[1])
    assert trainer.metrics["val/loss"] == pytest.approx(loss, rel=1e-12)


# examples/nanogpt
@pytest.mark.slow
@pytest.mark.parametrize("parts", [1, 4])
def test_rates_decay_and_clipping_are_those_by_hand(parts):
    trainer = built(
        "nanogpt",
        *("model.depth=1", "model.dim=16", "trainer.max_steps=12", "lr_scheduler.warmup.steps=3"),
        *("lr_scheduler.warmup.start_factor=0.25", "trainer.limit_val_batches=1"),
        f"trainer.gradient_accumulation_steps={parts}",
    ).trainer
    model = copy.deepcopy(trainer.model)
    batches = batches_of(trainer, parts)
    assert [tokens.shape for tokens, _ in batches] == [(12, 64)] * 12
    nanogpt_by_hand.train_by_hand(model, batches, updates=12, warmup=3)
    assert_same_state(trainer.model, model)


# examples/sparse_embeddings
@pytest.mark.slow
@pytest.mark.parametrize("parts", [1, 4])
def test_only_the_rows_that_a_batch_reads_are_moved_as_by_hand(parts):
    trainer = built(
        "sparse_embeddings",
        *("trainer.max_steps=6", "trainer.limit_val_batches=1"),
        f"trainer.gradient_accumulation_steps={parts}",
    ).trainer
    model = copy.deepcopy(trainer.model)
    start = model.users.weight.detach().clone()
    batches = batches_of(trainer, parts)
    assert [len(ratings) for _, ratings in batches] == [256] * 6
    sparse_by_hand.train_by_hand(model, [(pairs, y.double()) for pairs, y in batches])
    assert_same_state(trainer.model, model)
    moved = (trainer.model.users.weight != start).any(1).nonzero().flatten()
    seen = torch.cat([pairs[:, 0] for pairs, _ in batches]).unique()
    assert moved.tolist() == seen.tolist()


# examples/forecasting
@pytest.mark.slow
@pytest.mark.parametrize("parts", [1, 4])
def test_forecasts_are_those_by_hand_in_the_units_of_the_measurements(parts):
    trainer = built(
        "forecasting",
        *("trainer.max_epochs=3", "trainer.limit_train_batches=4", "data.shared.horizon=24"),
        f"trainer.gradient_accumulation_steps={parts}",
    ).trainer
    model = copy.deepcopy(trainer.model)
    batches = batches_of(trainer, parts)
    optimizer = torch.optim.Adam(model.parameters())
    for epoch in range(3):
        part = [(x.double(), y.double()) for x, y in batches[4 * epoch : 4 * epoch + 4]]
        forecasting_by_hand.train_epoch(model, optimizer, part, epoch)
    assert_same_state(trainer.model, model)

    val = HourlyLoad("val", 336, 24)
    windows = [val[index] for index in range(len(val))]
    columns = [torch.stack(column).double() for column in zip(*windows, strict=True)]
    loss, absolute = forecasting_by_hand.errors(model, [columns], model.std)
    assert trainer.metrics["val/loss"] == pytest.approx(loss, rel=1e-10)
    assert trainer.metrics["val/mae_load"] == pytest.approx(absolute[0], rel=1e-10)
    assert trainer.metrics["val/mae_temperature"] == pytest.approx(absolute[1], rel=1e-10)


def test_the_scaling_is_that_of_train_and_no_future_is_in_two_splits():
    sets = [HourlyLoad(split, history=48, horizon=24) for split in ("train", "val", "test")]
    train = sets[0]
    assert len({(*data.mean, *data.std) for data in sets}) == 1
    torch.testing.assert_close(torch.tensor(train.std), train.series.std(0))
    for before, data in itertools.pairwise(sets):
        past, _ = data[0]
        assert torch.equal(past, before.series[-48:])  # known when the first hour is forecast
    futures = sum(len(data.series) - 48 for data in sets)
    assert futures == 24 * 7 * 52 - 48
