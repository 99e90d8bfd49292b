"""`data.on_error: skip`: updates stay whole, evaluation counts nothing twice, nothing is silent."""

import logging
from typing import Any

import pytest
import torch

from data.errors import DataError
from data.loading.loader import Loader
from data.orders import Sequential, Shuffled, Subset, Weighted
from data.samplers import GivenBatches, SamplerOrder
from data.updates import UpdateSampler

BAD = {3: "raise", 11: "raise"}


def _load(dataset: Any, on_error: Any, workers: int = 0, **options: Any) -> Any:
    max_skipped = options.pop("max_skipped", 5)
    order = options.pop("order", Shuffled(len(dataset), 5))
    sampler = UpdateSampler(order, batch_size=6, **options)
    loader = Loader(
        dataset, sampler, seed=5, num_workers=workers, on_error=on_error, max_skipped=max_skipped
    )
    try:
        return [micro for epoch in range(2) for micro in loader.epoch(epoch)], loader
    finally:
        loader.close()


@pytest.mark.parametrize("workers", [0, 2])
def test_training_replaces_by_a_rule(noisy: Any, workers: int) -> None:
    micros, loader = _load(noisy(bad=BAD), "replace", workers)
    whole, _ = _load(noisy(), "raise")
    reference, _ = _load(noisy(bad=BAD), "replace")
    for got, same, intact in zip(micros, reference, whole, strict=True):
        assert torch.equal(got.batch[0], same.batch[0])
        assert got.piece == intact.piece
        for slot, index in enumerate(intact.piece.indices):
            if index in BAD:
                assert int(got.batch[0][slot, 0]) not in BAD
            else:
                assert torch.equal(got.batch[0][slot], intact.batch[0][slot])
    assert sorted(entry.index for entry in loader.skipped) == [3, 11]


def test_a_replacement_does_not_depend_on_the_split(noisy: Any) -> None:
    whole = torch.cat([m.batch[0] for m in _load(noisy(bad=BAD), "replace")[0]])
    split, _ = _load(noisy(bad=BAD), "replace", gradient_accumulation_steps=3)
    assert torch.equal(torch.cat([m.batch[0] for m in split]), whole)


@pytest.mark.parametrize(
    "order",
    [
        pytest.param(lambda data: Subset(data, 5, [3, 11, 4, 9]), id="subset"),
        pytest.param(
            lambda data: Weighted(data, 5, [float(i in (3, 4, 9)) for i in range(20)], 20),
            id="weighted",
        ),
        pytest.param(lambda data: SamplerOrder([3, 11, 4, 9], 5), id="torch"),
        pytest.param(lambda data: GivenBatches([[3, 4], [11, 9]], 5), id="batches"),
    ],
)
@pytest.mark.parametrize("workers", [0, 2])
def test_a_replacement_is_one_of_the_samplers_own(noisy: Any, order: Any, workers: int) -> None:
    dataset = noisy(bad=BAD)
    micros, _ = _load(dataset, "replace", workers, order=order(dataset))
    assert {int(i) for micro in micros for i in micro.batch[0][:, 0]} == {4, 9}


@pytest.mark.parametrize("workers", [0, 2])
def test_evaluation_drops(noisy: Any, workers: int) -> None:
    micros, loader = _load(noisy(bad=BAD), "drop", workers, order=Sequential(20))
    first = micros[:4]
    seen = [i for m in first for i in m.piece.indices[: m.piece.count]]
    assert seen == [i for i in range(20) if i not in BAD]
    assert [int(i) for m in first for i in m.batch[0][:, 0]] == seen
    assert [m.piece.count for m in first] == [5, 5, 6, 2]
    assert len(loader.skipped) == 2


def test_a_piece_with_nothing_left_counts_nothing(noisy: Any) -> None:
    bad = dict.fromkeys(range(6), "raise")
    micros, _ = _load(noisy(bad=bad), "drop", order=Sequential(20), max_skipped=10)
    assert micros[0].piece.count == 0
    assert micros[0].batch[0].shape == (1, 4)
    assert int(micros[0].batch[0][0, 0]) > 5


def test_skipped_are_listed_with_path_and_reason_and_logged_once(
    noisy: Any, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        _, loader = _load(noisy(bad=BAD), "replace")
    entry = next(entry for entry in loader.skipped if entry.index == 3)
    assert entry.path == "/pictures/3.jpg"
    assert entry.reason == "sample 3 (/pictures/3.jpg): ValueError: broken in two lines"
    assert caplog.text.count("/pictures/3.jpg") == 1


@pytest.mark.parametrize("on_error", ["replace", "drop"])
def test_more_than_the_budget_ends_the_run(noisy: Any, on_error: str) -> None:
    with pytest.raises(DataError, match=r"more than data\.max_skipped=1: sample \d+ ") as caught:
        _load(noisy(bad=BAD), on_error, max_skipped=1)
    assert caught.value.exit_code == 3


@pytest.mark.parametrize("on_error", ["replace", "drop"])
def test_a_data_set_of_nothing_but_broken_samples(noisy: Any, on_error: str) -> None:
    dataset = noisy(4, bad=dict.fromkeys(range(4), "raise"))
    with pytest.raises(DataError, match="replacements could not be loaded"):
        _load(dataset, on_error, max_skipped=100)


def test_what_was_left_out_before_a_resume_counts_after_it(noisy: Any) -> None:
    def fresh(bad: dict[int, str], max_skipped: int) -> Loader:
        sampler = UpdateSampler(Sequential(20), batch_size=6)
        return Loader(noisy(bad=bad), sampler, seed=5, on_error="replace", max_skipped=max_skipped)

    first = fresh({3: "raise"}, 1)
    list(first.epoch(0))
    second = fresh({3: "raise", 11: "raise"}, 1)
    second.load_skipped_state(first.skipped_state())
    assert [entry.index for entry in second.skipped] == [3]
    with pytest.raises(DataError, match="2 samples could not be loaded"):
        list(second.epoch(0))
