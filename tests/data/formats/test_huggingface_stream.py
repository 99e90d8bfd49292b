"""Streaming sets of the package `datasets`; made here, nothing is downloaded."""

from pathlib import Path

import pytest
import torch

from data.errors import DataError
from data.formats.huggingface import streamed
from data.loading.loader import Loader
from data.orders import Sequential
from data.streams import Stream
from data.updates import UpdateSampler

pytest.importorskip("datasets", reason="the extra huggingface is not installed")
COLUMNS = {"input": "x", "target": "y"}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for shard in range(3):
        rows = [
            f'{{"x": [{n}.5, 2.0], "y": {n % 3}}}\n' for n in range(shard * 10, shard * 10 + 10)
        ]
        (tmp_path / f"train-{shard}.jsonl").write_text("".join(rows))
    return tmp_path


def numbers(data: Stream, workers: int = 0, epoch: int = 0, start: int = 0) -> list[int]:
    sampler = UpdateSampler(Sequential(len(data)), batch_size=4)
    loader = Loader(data, sampler, seed=0, num_workers=workers)
    batches = [micro.batch for micro in loader.epoch(epoch, start)]
    loader.close()
    return [int(x) for inputs, _ in batches for x in inputs[:, 0]]


def test_rows_come_in_the_order_of_the_files(folder: Path) -> None:
    data = Stream(streamed(str(folder), "train", COLUMNS), 30)
    assert numbers(data) == list(range(30))
    inputs, target = data[7]
    assert torch.equal(inputs, torch.tensor([7.5, 2.0]))
    assert int(target) == 1


def test_a_shuffled_stream_is_a_function_of_seed_and_epoch(folder: Path) -> None:
    def opened() -> Stream:
        return Stream(streamed(str(folder), "train", COLUMNS, seed=1, buffer=8), 30)

    epochs = [numbers(opened(), epoch=epoch) for epoch in (0, 1)]
    assert all(sorted(order) == list(range(30)) for order in epochs)
    assert epochs[0] != epochs[1]
    assert numbers(opened(), epoch=1, start=3) == epochs[1][12:]  # as a resume begins
    assert numbers(opened(), workers=2, epoch=1) == epochs[1]
    both = opened()
    assert [numbers(both, epoch=epoch) for epoch in (0, 1)] == epochs


def test_mistakes_are_named(folder: Path) -> None:
    with pytest.raises(DataError, match=r"has no split val, only train: set data\.val=null"):
        streamed(str(folder), "val", COLUMNS)
    with pytest.raises(DataError, match="has no column 'z'; it has 'x', 'y'"):
        streamed(str(folder), "train", {"input": "z"})
