"""Pictures in others' formats: tar shards; the package `datasets`, also streamed."""

import io
import json
import os
import pickle
import tarfile

import fsspec
import numpy as np
import pytest
import torch
from PIL import Image

from regimen.conf.check import parse
from regimen.conf.errors import ConfigError
from regimen.data.decode import read_image
from regimen.data.errors import DataError
from regimen.data.formats.huggingface import huggingface
from regimen.data.formats.huggingface_stream import streamed
from regimen.data.formats.shards import _ENTRY, tar_shards
from regimen.data.orders import Shuffled
from regimen.data.streams import Stream
from regimen.scripts.composition.compose import compose
from regimen.trainer.assembly.data import build_data
from toy_batches import batches


def picture(number, form="JPEG"):
    pixels = np.random.default_rng(number).integers(256, size=(9, 8, 3), dtype=np.uint8)
    content = io.BytesIO()
    Image.fromarray(pixels).save(content, form)
    return content.getvalue()


def decoded(content, folder):
    (folder / "image").write_bytes(content)
    return read_image(folder / "image")


def read(*words, **options):
    return torch.cat(batches(*words, **options))


def sample(number, label):
    form = "PNG" if number % 2 else "JPEG"
    ending = "png" if number % 2 else "jpg"
    return {
        f"s{number:04}.{ending}": picture(number, form),
        f"s{number:04}.mask.png": b"another field of the sample",
        f"s{number:04}.cls": label.encode(),
        f"s{number:04}.json": json.dumps({"kind": f"kind {label}", "id": number}).encode(),
    }


def write(path, files):
    path.parent.mkdir(exist_ok=True)
    with tarfile.open(path, "w") as archive:
        for name, content in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))


def shard(path, numbers):
    write(path, {k: v for n in numbers for k, v in sample(n, str(n % 3)).items()})


@pytest.fixture
def shards(tmp_path):
    shard(tmp_path / "train-000.tar", range(7))
    shard(tmp_path / "train-001.tar", range(7, 20))
    shard(tmp_path / "val" / "0.tar", range(20, 26))
    return tmp_path


def tar(root, split="train", **options):
    return tar_shards(str(root), split, **options)


def test_samples_are_those_of_the_files(shards, tmp_path):
    data = tar(shards)
    val = tar(shards, "val")
    assert (len(data), len(val), tar(shards, "test")) == (20, 6, None)
    for index in (19, 0, 7, 6):  # any order, in a worker as well
        image, target = pickle.loads(pickle.dumps(data))[index]
        assert target == data[index][1] == index % 3
        form = "PNG" if index % 2 else "JPEG"
        assert torch.equal(image, decoded(picture(index, form), tmp_path))
    assert data.path(7).endswith("train-001.tar:s0007.png")
    assert data.classes == val.classes == ["0", "1", "2"]
    assert val[0][1] == 20 % 3
    named = tar(shards, label="json.kind")
    assert named.classes == ["kind 0", "kind 1", "kind 2"]
    assert [named[index][1] for index in range(4)] == [0, 1, 2, 0]
    here, there = (read(tar(shards), 1, workers=n, order=Shuffled(20, 3)) for n in (0, 2))
    assert torch.equal(here, there)


def test_the_index_is_made_once(shards, caplog):
    caplog.set_level("INFO")
    before = sorted(shards.rglob("*"))
    dry = ["experiment=resnet18", "data=shards", f"data.root={shards}", "dry_run=true"]
    train = build_data(parse(compose(dry).config)).sets["train"]
    assert train is not None
    assert len(train) == 20
    assert sorted(shards.rglob("*")) == before
    caplog.clear()
    assert torch.equal(tar(shards)[12][0], tar(shards)[12][0])
    assert len(list((shards / ".index").iterdir())) == 2
    assert caplog.text.count("indexing") == 2
    shard(shards / "train-001.tar", range(7, 30))  # another file of that name
    assert len(tar(shards)) == 30
    assert caplog.text.count("indexing") == 3
    for kept in (shards / ".index").iterdir():
        kept.write_bytes(kept.read_bytes()[:50])
    assert len(tar(shards)) == 30
    assert "is damaged and made again" in caplog.text


@pytest.mark.parametrize(
    "index",
    [
        pytest.param(np.zeros((3, 3)), id="numbers"),
        pytest.param(np.zeros(0, "i8,i8,i8,S2,S2"), id="other names"),
        pytest.param(np.array(["a"]), id="texts"),
        pytest.param(np.rec.fromrecords([(0, -5, 1, b"a", b"b")], names=_ENTRY), id="negative"),
        pytest.param(
            np.rec.fromrecords([("a", 5, 1, b"a", b"b")], names=_ENTRY), id="a shard's name"
        ),
        pytest.param(
            np.rec.fromrecords([(0, 5, 1, b"a", 3)], names=_ENTRY), id="labels as numbers"
        ),
    ],
)
def test_an_index_of_another_form_is_made_again(shards, caplog, index):
    wanted = [int(target) for _, target in tar(shards)]
    for kept in (shards / ".index").iterdir():
        np.save(kept, index)
    assert [int(target) for _, target in tar(shards)] == wanted
    assert caplog.text.count("is damaged and made again") == 2


@pytest.mark.parametrize(
    "label",
    [
        pytest.param(b'["kind"]', id="a list"),
        pytest.param(b'{"kind": ["a"]}', id="a list in it"),
        pytest.param(b'{"kind": {"a": 1}}', id="an object in it"),
        pytest.param(b'{"kind": null}', id="null"),
        pytest.param(b'{"kind": true}', id="true"),
        pytest.param(b'{"kind": 1.5}', id="a fraction"),
        pytest.param(b'{"kind": "\\ud800"}', id="a lone surrogate"),
        pytest.param(b'{"kind": "' + b"x" * 5000 + b'"}', id="a long one"),
        pytest.param(b"[" * 5000, id="brackets"),
        pytest.param(b'{"other": 1}', id="no such field"),
        pytest.param(b"\xff", id="no text"),
        pytest.param(b" " * 2_000_000, id="2 MB"),
    ],
)
def test_a_json_label_of_another_form_is_named(tmp_path, label):
    write(tmp_path / "train.tar", {"a.png": picture(0), "a.json": label})
    with pytest.raises(DataError, match=r"train\.tar:a\.json") as caught:
        tar(tmp_path, label="json.kind")
    assert len(str(caught.value)) < 500


def test_a_file_that_is_no_shard_does_not_stand_for_a_split(shards):
    (shards / "val").rename(shards / "validation")
    (shards / "val").mkdir()
    (shards / "val" / "notes.txt").write_text("where they come from")
    (shards / "val.txt").write_text("a list")
    assert len(tar(shards, "val")) == 6
    (shards / "val" / "0.tar.gz").write_bytes(b"")
    with pytest.raises(DataError, match="compressed"):
        tar(shards, "val")


def test_a_pipe_is_no_shard(shards):
    os.mkfifo(shards / "train-002.tar")
    with pytest.raises(DataError, match=r"train-002\.tar: is a folder, pipe or device"):
        tar(shards)


def test_val_is_cut_from_train_or_a_fold_of_it(shards):
    folds = [tar(shards, "val", fold=k, folds=4) for k in range(4)]
    assert sum(map(len, folds)) == len(tar(shards)) == 20
    assert len(tar(shards, "train", fold=1, folds=4)) == 20 - len(folds[1])
    (shards / "val" / "0.tar").unlink()
    train, val = (tar(shards, split, val_fraction=0.3) for split in ("train", "val"))
    assert (len(train), len(val)) == (14, 6)
    assert val.targets.bincount().tolist() == [2, 2, 2]


def test_a_url_is_read_alike(shards, tmp_path):
    memory = fsspec.filesystem("memory")
    for path in sorted(shards.glob("*.tar")):
        memory.pipe(f"/bucket/{path.name}", path.read_bytes())
    data = tar("memory://bucket", cache_dir=str(tmp_path / "kept"), val_fraction=0.0)
    local = tar(shards, val_fraction=0.0)
    assert len(list((tmp_path / "kept").iterdir())) == 2
    assert len(data) == len(local) == 20
    for index in range(20):
        assert data.path(index).rpartition("/")[2] == local.path(index).rpartition("/")[2]
        assert torch.equal(data[index][0], local[index][0])


@pytest.mark.parametrize(
    ("files", "options", "words"),
    [
        ({"a.jpg": b"x"}, {}, r"sample 'a' has no \.cls"),
        ({"a.cls": b"1"}, {}, "sample 'a' has no image"),
        ({}, {}, "holds no samples"),
        ({"a.jpg": b"x", "a.cls": b""}, {}, r"a\.cls: the label is empty"),
        ({"a.jpg": b"x", "a.json": b"{}"}, {"label": "json.kind"}, "no label in it"),
        ({"a.jpg": b"\xff\xd8 no", "a.cls": b"0"}, {}, r"train-0\.tar:a\.jpg"),
        ({"a.jpg": b"x", "a.cls": b"9999"}, {"num_classes": 9}, r"9999 is not .*num_classes, 9: "),
    ],
)
def test_a_mistake_in_a_shard_is_named(tmp_path, files, options, words):
    write(tmp_path / "train-0.tar", files)
    with pytest.raises(DataError, match=words):
        tar(tmp_path, val_fraction=0.0, **options)[0]


def test_other_files_and_classes_are_refused(shards):
    with pytest.raises(DataError, match="holds no shards"):
        tar(shards / "val")
    write(shards / "val" / "1.tar", sample(99, "7"))
    with pytest.raises(DataError, match=r"1\.tar:s0099.*class '7' is not among those of train"):
        tar(shards, "val")
    data = tar(shards)
    (shards / "train-000.tar").write_bytes(b"\x1f\x8b no tar file")
    with pytest.raises(DataError, match="shorter than when it was indexed"):
        data[3]
    with pytest.raises(DataError, match="not an uncompressed tar"):
        tar(shards)


@pytest.mark.parametrize(
    "name", ["train-002.tar.gz", "val-1.tgz", "train/3.tar.xz", "test.tar.zst"]
)
def test_packed_shards_are_named_and_not_passed_over(shards, name):
    (shards / name).parent.mkdir(exist_ok=True)
    (shards / name).write_bytes(b"")
    (shards / "train-000.tar.md5").write_bytes(b"no shard")
    split = name[:5].strip("-.") if not name.startswith("test") else "test"
    with pytest.raises(DataError, match=rf"{name} is a compressed tar file.*unpack it to \.tar"):
        tar(shards, split, val_fraction=0.0)


def test_a_dot_in_the_name_of_a_sample_is_named(shards):
    write(shards / "val" / "1.tar", {"cat.v2.jpg": picture(1), "cat.v2.cls": b"1"})
    told = (
        r"sample 'cat' has no image, only \.v2\.jpg, \.v2\.cls \(a sample's name ends at its first"
    )
    with pytest.raises(DataError, match=told):
        tar(shards, "val")


COLUMNS = {"input": "image", "target": "label"}
NUMBERS = {"input": "x", "target": "y"}


@pytest.fixture
def arrow(tmp_path):
    datasets = pytest.importorskip("datasets", reason="the extra huggingface is not installed")
    features = datasets.Features(
        {"image": datasets.Image(), "label": datasets.ClassLabel(names=["cat", "dog"])}
    )
    images = [{"bytes": picture(n), "path": None} for n in range(10)]
    rows = {"image": images, "label": [n % 2 for n in range(10)]}
    table = datasets.Dataset.from_dict(rows, features=features)
    parts = datasets.DatasetDict({"train": table, "test": table.select([1, 2])})
    parts.save_to_disk(tmp_path / "d")
    return tmp_path / "d"


def hub(path, split="train", columns=COLUMNS, **options):
    return huggingface(str(path), split, columns, **options)


def test_images_are_decoded_as_files_are(arrow, tmp_path):
    train, val, test = (hub(arrow, s, val_fraction=0.4) for s in ("train", "val", "test"))
    assert [len(data) for data in (train, val, test)] == [6, 4, 2]
    assert train.classes == ["cat", "dog"]
    assert val.targets.bincount().tolist() == [2, 2]
    image, target = pickle.loads(pickle.dumps(test))[0]
    assert torch.equal(image, decoded(picture(1), tmp_path))
    assert target == 1
    assert train.fingerprint() != val.fingerprint()
    assert train.fingerprint() == hub(arrow, val_fraction=0.4).fingerprint()
    assert [len(hub(arrow, s, fold=0, folds=5)) for s in ("train", "val", "test")] == [8, 2, 2]


def test_a_tokenizer_that_is_not_there_is_an_error_of_the_configuration(arrow, tmp_path):
    pytest.importorskip("transformers", reason="the extra transformers is not installed")
    with pytest.raises(ConfigError, match=r"data\.tokenizer.*nowhere"):
        hub(arrow, tokenizer=str(tmp_path / "nowhere"))


@pytest.fixture
def lines(tmp_path):
    pytest.importorskip("datasets", reason="the extra huggingface is not installed")
    (tmp_path / "lines").mkdir()
    for part in range(3):
        numbers = range(part * 10, part * 10 + 10)
        rows = [f'{{"x": [{n}.5, 2.0], "y": {n % 3}, "kind": "k{n % 2}"}}\n' for n in numbers]
        (tmp_path / "lines" / f"train-{part}.jsonl").write_text("".join(rows))
    return tmp_path / "lines"


def test_a_stream_is_a_function_of_seed_and_epoch(lines):
    plain = Stream(streamed(str(lines), "train", NUMBERS), 30)
    assert read(plain)[:, 0].tolist() == [n + 0.5 for n in range(30)]  # the files' order
    assert int(plain[7][1]) == 1
    inputs, target = hub(lines, columns=NUMBERS, classification=False, val_fraction=0.0)[4]
    assert (inputs.tolist(), inputs.dtype, target.item()) == ([4.5, 2.0], torch.float32, 1)
    named = hub(lines, columns={"input": "x", "target": "kind"}, val_fraction=0.0)
    assert (named.classes, [named[i][1] for i in range(3)]) == (["k0", "k1"], [0, 1, 0])

    def opened():
        return Stream(streamed(str(lines), "train", NUMBERS, seed=1, buffer=8), 30)

    epochs = [read(opened(), epoch=epoch) for epoch in (0, 1)]
    assert all(torch.equal(rows[:, 0].sort().values, read(plain)[:, 0]) for rows in epochs)
    assert not torch.equal(*epochs)
    assert torch.equal(read(opened(), epoch=1, start=2), epochs[1][12:])  # as a resume begins
    assert torch.equal(read(opened(), workers=2, epoch=1), epochs[1])
    both = opened()
    assert all(torch.equal(read(both, epoch=n), epochs[n]) for n in (0, 1))


def test_mistakes_are_named(arrow, lines):
    with pytest.raises(DataError, match="has no column 'picture'; it has 'image', 'label'"):
        hub(arrow, columns={"input": "picture"})
    with pytest.raises(DataError, match=r"data\.columns\.inputs: unknown"):
        hub(arrow, columns={"inputs": "image"})
    with pytest.raises(DataError, match=r"data\.path="):
        hub(arrow / "absent")
    with pytest.raises(DataError, match=r"has no split val, only train: set data\.val=null"):
        streamed(str(lines), "val", NUMBERS)
    with pytest.raises(DataError, match="has no column 'z'; it has 'x', 'y'"):
        streamed(str(lines), "train", {"input": "z"})
