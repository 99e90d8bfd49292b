import io
import json
import pickle
import tarfile
from pathlib import Path

import fsspec
import numpy as np
import pytest
import torch
from PIL import Image

from data.decode import read_image
from data.errors import DataError
from data.formats.shards import tar_shards
from data.loading.loader import Loader
from data.orders import Shuffled
from data.updates import UpdateSampler


def picture(number: int) -> bytes:
    pixels = np.random.default_rng(number).integers(256, size=(9, 8, 3), dtype=np.uint8)
    content = io.BytesIO()
    Image.fromarray(pixels).save(content, "PNG" if number % 2 else "JPEG")
    return content.getvalue()


def sample(number: int, label: str) -> dict[str, bytes]:
    ending = "png" if number % 2 else "jpg"
    return {
        f"s{number:04}.{ending}": picture(number),
        f"s{number:04}.cls": label.encode(),
        f"s{number:04}.json": json.dumps({"kind": f"kind {label}", "id": number}).encode(),
    }


def write(path: Path, files: dict[str, bytes]) -> None:
    path.parent.mkdir(exist_ok=True)
    with tarfile.open(path, "w") as archive:
        for name, content in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))


def shard(path: Path, numbers: range) -> None:
    write(path, {k: v for n in numbers for k, v in sample(n, str(n % 3)).items()})


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    shard(tmp_path / "train-000.tar", range(7))
    shard(tmp_path / "train-001.tar", range(7, 20))
    shard(tmp_path / "val" / "0.tar", range(20, 26))
    return tmp_path


def opened(root: Path | str, split: str = "train", **options):
    return tar_shards(str(root), split, **options)


def test_samples_are_those_of_the_files(folder: Path, tmp_path: Path) -> None:
    data, val = opened(folder), opened(folder, "val")
    assert (len(data), len(val), opened(folder, "test")) == (20, 6, None)
    for index in (19, 0, 7, 6):  # any order
        image, target = data[index]
        assert target == index % 3
        (tmp_path / "image").write_bytes(picture(index))
        assert torch.equal(image, read_image(tmp_path / "image"))
    assert data.path(7).endswith("train-001.tar:s0007.png")
    assert data.classes == val.classes == ["0", "1", "2"]
    assert val[0][1] == 20 % 3


def test_a_field_of_json_names_the_class(folder: Path) -> None:
    data = opened(folder, label="json.kind")
    assert data.classes == ["kind 0", "kind 1", "kind 2"]
    assert [data[index][1] for index in range(4)] == [0, 1, 2, 0]


def test_the_index_is_made_once(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    opened(folder)
    assert len(list((folder / ".index").iterdir())) == 2
    assert caplog.text.count("indexing") == 2
    assert torch.equal(opened(folder)[12][0], opened(folder)[12][0])
    assert caplog.text.count("indexing") == 2
    shard(folder / "train-001.tar", range(7, 30))  # another file of that name
    assert len(opened(folder)) == 30
    assert caplog.text.count("indexing") == 3
    for kept in (folder / ".index").iterdir():
        kept.write_bytes(kept.read_bytes()[:50])
    assert len(opened(folder)) == 30
    assert "is damaged and made again" in caplog.text


def test_without_val_shards_a_part_of_train_is_taken(folder: Path) -> None:
    (folder / "val" / "0.tar").unlink()
    train, val = (opened(folder, split, val_fraction=0.3) for split in ("train", "val"))
    assert (len(train), len(val)) == (14, 6)
    assert not {train.path(i) for i in range(14)} & {val.path(i) for i in range(6)}
    assert val.targets.bincount().tolist() == [2, 2, 2]


def test_workers_read_what_one_process_reads(folder: Path) -> None:
    def batches(workers: int) -> list[torch.Tensor]:
        data = opened(folder)
        loader = Loader(
            data, UpdateSampler(Shuffled(20, 3), batch_size=4), seed=0, num_workers=workers
        )
        found = [part for micro in loader.epoch(1) for part in micro.batch]
        loader.close()
        return found

    one, two = batches(0), batches(2)
    assert len(one) == 10
    assert all(torch.equal(a, b) for a, b in zip(one, two, strict=True))


def test_a_url_is_read_alike(folder: Path, tmp_path: Path) -> None:
    memory = fsspec.filesystem("memory")
    for path in sorted(folder.glob("*.tar")):
        memory.pipe(f"/bucket/{path.name}", path.read_bytes())
    data = opened("memory://bucket", cache_dir=str(tmp_path / "kept"))
    local = opened(folder, val_fraction=0.0)
    assert len(list((tmp_path / "kept").iterdir())) == 2
    assert len(data) + len(opened("memory://bucket", "val")) == len(local) == 20
    by_name = {local.path(i).rpartition(":")[2]: local[i][0] for i in range(20)}
    for index in range(len(data)):
        assert torch.equal(data[index][0], by_name[data.path(index).rpartition(":")[2]])


def test_a_worker_opens_the_shards_itself(folder: Path) -> None:
    data = opened(folder)
    image = data[3][0]
    assert torch.equal(pickle.loads(pickle.dumps(data))[3][0], image)


@pytest.mark.parametrize(
    ("files", "options", "words"),
    [
        pytest.param({"a.jpg": b"x"}, {}, r"sample 'a' has no \.cls", id="no-label"),
        pytest.param({"a.cls": b"1"}, {}, "sample 'a' has no image", id="no-image"),
        pytest.param({}, {}, "holds no samples", id="empty"),
        pytest.param({"a.jpg": b"x", "a.cls": b""}, {}, r"a\.cls: the label is empty", id="blank"),
        pytest.param(
            {"a.jpg": b"x", "a.json": b"{}"}, {"label": "json.kind"}, "no label in it", id="field"
        ),
    ],
)
def test_what_is_wrong_is_named(tmp_path: Path, files, options, words: str) -> None:
    write(tmp_path / "train-0.tar", files)
    with pytest.raises(DataError, match=words):
        opened(tmp_path, **options)


def test_other_files_and_classes_are_refused(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="holds no shards"):
        opened(tmp_path / "val")
    write(folder / "val" / "1.tar", sample(99, "7"))
    with pytest.raises(DataError, match=r"1\.tar:s0099.*class '7' is not among those of train"):
        opened(folder, "val")
    (folder / "train-000.tar").write_bytes(b"\x1f\x8b no tar file")
    with pytest.raises(DataError, match="not an uncompressed tar"):
        opened(folder)


def test_a_broken_image_is_named(folder: Path) -> None:
    write(folder / "train-000.tar", {"a.jpg": b"\xff\xd8 nothing", "a.cls": b"0"})
    data = opened(folder)
    with pytest.raises(DataError, match=r"train-000\.tar:a\.jpg"):
        data[0]


def test_folds_are_shared_out_of_train(folder: Path) -> None:
    folds = [opened(folder, "val", fold=k, folds=4) for k in range(4)]
    assert sum(map(len, folds)) == len(opened(folder)) == 20
    assert all(set(one.targets.tolist()) == {0, 1, 2} for one in folds)
    assert len(opened(folder, "train", fold=1, folds=4)) == 20 - len(folds[1])


def test_a_dry_run_keeps_no_index(folder: Path) -> None:
    before = sorted(folder.rglob("*"))
    assert len(opened(folder, keep_index=False)) == 20
    assert sorted(folder.rglob("*")) == before
    opened(folder)
    assert sorted(folder.rglob("*")) != before


def test_a_class_number_is_bounded(tmp_path: Path) -> None:
    write(tmp_path / "train-0.tar", {**sample(0, "99999999999"), **sample(1, "0")})
    with pytest.raises(DataError, match=r"99999999999 is not below the number of samples .*, 2: "):
        opened(tmp_path)
    with pytest.raises(DataError, match=r"99999999999 is not below data\.num_classes, 10: "):
        opened(tmp_path, num_classes=10)
