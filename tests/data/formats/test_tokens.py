import pickle
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch

from data.errors import DataError
from data.formats.tokens import token_blocks
from data.loading.loader import Loader
from data.orders import Shuffled
from data.updates import UpdateSampler

NUMBERS = np.arange(1000, dtype=np.uint16) * 7 % 500


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    NUMBERS.tofile(tmp_path / "train.bin")
    NUMBERS[:100].tofile(tmp_path / "val.bin")
    return tmp_path


def opened(root: Path, split: str = "train", **options):
    return token_blocks(str(root), split, **{"context": 16, "num_classes": 500, **options})


def test_blocks_follow_each_other(folder: Path) -> None:
    data = opened(folder)
    assert len(data) == (1000 - 1) // 16
    for index in (0, 7, len(data) - 1):
        tokens, following = data[index]
        first = index * 16
        assert tokens.tolist() == NUMBERS[first : first + 16].tolist()
        assert following.tolist() == NUMBERS[first + 1 : first + 17].tolist()
    tokens, following = data.batch([3, 0])
    assert torch.equal(tokens, torch.stack([data[3][0], data[0][0]]))
    assert torch.equal(following, torch.stack([data[3][1], data[0][1]]))
    assert tokens.dtype == torch.int64


@pytest.mark.parametrize(
    ("name", "write"),
    [
        pytest.param("train.bin", lambda path: NUMBERS.astype("<u4").tofile(path), id="uint32"),
        pytest.param("train.npy", lambda path: np.save(path, NUMBERS), id="npy"),
    ],
)
def test_other_files_hold_the_same(folder: Path, tmp_path: Path, name: str, write) -> None:
    place = tmp_path / "other"
    place.mkdir()
    write(place / name)
    data = opened(place, dtype="uint32", val_fraction=0.0)
    assert all(torch.equal(a, b) for a, b in zip(data[5], opened(folder)[5], strict=True))


def test_text_is_read_by_bytes(tmp_path: Path) -> None:
    text = "Größe: naïve café. " * 20
    (tmp_path / "book.txt").write_text(text, encoding="utf-8")
    data = opened(tmp_path / "book.txt", num_classes=None, val_fraction=0.25)
    assert bytes(data[0][0].tolist()) == text.encode()[:16]
    assert len(data.classes) == data.num_classes == 256
    val = opened(tmp_path / "book.txt", "val", num_classes=None, val_fraction=0.25)
    boundary = len(text.encode()) - round(len(text.encode()) * 0.25)
    assert bytes(val[0][0].tolist()) == text.encode()[boundary : boundary + 16]
    assert opened(tmp_path / "book.txt", "test") is None


def test_a_shift_is_the_epochs_own_and_overlaps_nothing(folder: Path) -> None:
    data = opened(folder, shift=True)
    starts = {}
    for epoch in range(40):
        data.set_epoch(epoch)
        seen = torch.cat([data[index][0] for index in range(len(data))]).tolist()
        offset = next(o for o in range(16) if NUMBERS[o] == seen[0])
        assert seen == NUMBERS[offset : offset + len(seen)].tolist()
        starts[epoch] = offset
    assert len(set(starts.values())) > 10
    again = opened(folder, shift=True)
    again.set_epoch(17)
    assert again[0][0][0] == NUMBERS[starts[17]]


def test_workers_read_what_one_process_reads(folder: Path) -> None:
    def batches(workers: int) -> list[torch.Tensor]:
        data = opened(folder, shift=True)
        sampler = UpdateSampler(Shuffled(len(data), 0), batch_size=8)
        loader = Loader(data, sampler, seed=0, num_workers=workers)
        found = [m.batch[0] for epoch in (0, 1) for m in loader.epoch(epoch)]
        loader.close()
        return found

    one, two = batches(0), batches(2)
    assert len(one) == len(two) > 10
    assert all(torch.equal(a, b) for a, b in zip(one, two, strict=True))


def test_a_worker_maps_the_file_itself(folder: Path) -> None:
    data = opened(folder)
    content = pickle.dumps(data)
    assert len(content) < 1500
    assert torch.equal(pickle.loads(content)[3][0], data[3][0])


def test_the_fingerprint_tells_files_apart(folder: Path) -> None:
    before = opened(folder).fingerprint()
    assert opened(folder).fingerprint() == before
    NUMBERS[::-1].tofile(folder / "train.bin")
    assert opened(folder).fingerprint() != before


def test_without_a_val_file_the_end_of_train_is_taken(folder: Path) -> None:
    (folder / "val.bin").unlink()
    train, val = opened(folder, val_fraction=0.2), opened(folder, "val", val_fraction=0.2)
    assert val[0][0][0] == NUMBERS[800]
    assert len(train) == (800 - 1) // 16
    assert opened(folder, "val", val_fraction=0.0) is None


@pytest.mark.parametrize("shift", [False, True])
def test_folds_are_contiguous_and_share_out_the_file(folder: Path, shift: bool) -> None:
    held: list[int] = []
    for fold in range(3):
        train = opened(folder, shift=shift, fold=fold, folds=3)
        val = opened(folder, "val", fold=fold, folds=3)
        train.set_epoch(5)
        first, last = fold * 1000 // 3, (fold + 1) * 1000 // 3
        held += val.batch(range(len(val)))[0].flatten().tolist()
        assert val[0][0][0] == NUMBERS[first]
        starts = [train._first(index) for index in range(len(train))]
        used = {place for start in starts for place in range(start, start + 17)}
        assert len(train) >= 38
        assert used.isdisjoint(range(first, last))  # what follows the last token of a block, too
        assert all(b - a >= 16 for a, b in pairwise(starts))
        assert train.fingerprint() != opened(folder, fold=(fold + 1) % 3, folds=3).fingerprint()
    assert len(held) == 3 * 20 * 16
    with pytest.raises(IndexError):
        train[len(train)]


def test_the_form_of_prompts_is_known_of_text_alone(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "book.txt").write_text("a" * 100)
    text = opened(tmp_path / "book.txt", num_classes=None, val_fraction=0.0)
    assert text.input_form() == {"kind": "text", "encoding": "bytes", "context": 16}
    assert opened(folder).input_form() == {"kind": "array"}


@pytest.mark.parametrize(
    ("prepare", "options", "words"),
    [
        pytest.param(
            lambda f: None,
            {"num_classes": 200},
            r"train\.bin: token \d+ is \d+, .*is 200",
            id="big",
        ),
        pytest.param(lambda f: None, {"num_classes": None}, "vocabulary", id="no-vocabulary"),
        pytest.param(
            lambda f: (f / "train.bin").write_bytes(b"abc"), {}, "3 bytes are no list", id="odd"
        ),
        pytest.param(lambda f: (f / "train.bin").write_bytes(b""), {}, "0 bytes", id="empty"),
        pytest.param(lambda f: None, {"context": 2000}, "1000 tokens are too few", id="short"),
        pytest.param(lambda f: (f / "train.bin").unlink(), {}, "no such file", id="missing"),
        pytest.param(
            lambda f: (
                (f / "train.bin").unlink(),
                np.save(f / "train.npy", np.zeros((3, 3))),
            ),
            {},
            "not a row of integers",
            id="shape",
        ),
    ],
)
def test_what_is_wrong_is_named(folder: Path, prepare, options, words: str) -> None:
    prepare(folder)

    def read() -> None:
        data = opened(folder, **options)
        data.batch(range(len(data)))

    with pytest.raises(DataError, match=words):
        read()
