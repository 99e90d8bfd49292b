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
    random = np.random.default_rng(number)
    pixels = random.integers(256, size=(9, 8, 3), dtype=np.uint8)
    content = io.BytesIO()
    Image.fromarray(pixels).save(content, form)
    return content.getvalue()


def decoded(content, folder):
    (folder / "image").write_bytes(content)
    return read_image(folder / "image")


def read(*words, **options):
    return torch.cat(batches(*words, **options))


def form_of(number):
    """Return the format of a sample's picture: each second one is a PNG file."""
    return "PNG" if number % 2 else "JPEG"


def sample(number, label):
    form = form_of(number)
    ending = {"PNG": "png", "JPEG": "jpg"}[form]
    facts = {"kind": f"kind {label}", "id": number}
    return {
        f"s{number:04}.{ending}": picture(number, form),
        f"s{number:04}.mask.png": b"another field of the sample",
        f"s{number:04}.cls": label.encode(),
        f"s{number:04}.json": json.dumps(facts).encode(),
    }


def write(path, files):
    path.parent.mkdir(exist_ok=True)
    with tarfile.open(path, "w") as archive:
        for name, content in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))


def shard(path, numbers):
    files = {}
    for number in numbers:
        files |= sample(number, str(number % 3))
    write(path, files)


@pytest.fixture
def shards(tmp_path):
    shard(tmp_path / "train-000.tar", range(7))
    shard(tmp_path / "train-001.tar", range(7, 20))
    shard(tmp_path / "val" / "0.tar", range(20, 26))
    return tmp_path


def tar(root, split="train", **options):
    return tar_shards(str(root), split, **options)


def targets_of(data, indices=None):
    if indices is None:
        indices = range(len(data))
    return [int(data[index][1]) for index in indices]


def test_samples_are_those_of_the_files(shards, tmp_path):
    data = tar(shards)
    in_worker = pickle.loads(pickle.dumps(data))

    assert len(data) == 20
    for index in (19, 0, 7, 6):  # any order, in a worker as well
        image, target = in_worker[index]
        _, target_here = data[index]
        expected = decoded(picture(index, form_of(index)), tmp_path)
        assert target == target_here == index % 3
        assert torch.equal(image, expected)
    assert data.path(7).endswith("train-001.tar:s0007.png")


def test_splits_are_the_shards_of_their_name(shards):
    val = tar(shards, "val")

    assert len(val) == 6
    assert tar(shards, "test") is None
    assert tar(shards).classes == val.classes == ["0", "1", "2"]
    _, target = val[0]
    assert target == 20 % 3


def test_a_label_may_be_a_field_of_json(shards):
    named = tar(shards, label="json.kind")

    assert named.classes == ["kind 0", "kind 1", "kind 2"]
    assert targets_of(named, range(4)) == [0, 1, 2, 0]


def test_shards_are_read_alike_here_and_in_workers(shards):
    order = Shuffled(20, 3)

    here = read(tar(shards), 1, workers=0, order=order)
    in_workers = read(tar(shards), 1, workers=2, order=order)

    assert torch.equal(here, in_workers)


def test_a_plan_makes_no_index(shards):
    before = sorted(shards.rglob("*"))
    words = ["experiment=resnet18", "data=shards", f"data.root={shards}", "dry_run=true"]
    config = parse(compose(words).config)

    train = build_data(config).sets["train"]

    assert train is not None
    assert len(train) == 20
    assert sorted(shards.rglob("*")) == before


def test_the_index_is_made_once(shards, caplog):
    caplog.set_level("INFO")
    image, _ = tar(shards)[12]
    again, _ = tar(shards)[12]
    assert torch.equal(image, again)
    assert len(list((shards / ".index").iterdir())) == 2
    assert caplog.text.count("indexing") == 2

    shard(shards / "train-001.tar", range(7, 30))  # another file of that name

    assert len(tar(shards)) == 30
    assert caplog.text.count("indexing") == 3


def test_a_damaged_index_is_made_again(shards, caplog):
    assert len(tar(shards)) == 20
    for file in (shards / ".index").iterdir():
        content = file.read_bytes()
        file.write_bytes(content[:50])

    assert len(tar(shards)) == 20

    assert "is damaged and made again" in caplog.text


def entry(*values):
    """Return an index of one sample."""
    return np.rec.fromrecords([values], names=_ENTRY)


@pytest.mark.parametrize(
    "index",
    [
        pytest.param(np.zeros((3, 3)), id="numbers"),
        pytest.param(np.zeros(0, "i8,i8,i8,S2,S2"), id="other names"),
        pytest.param(np.array(["a"]), id="texts"),
        pytest.param(entry(0, -5, 1, b"a", b"b"), id="negative"),
        pytest.param(entry("a", 5, 1, b"a", b"b"), id="a shard's name"),
        pytest.param(entry(0, 5, 1, b"a", 3), id="labels as numbers"),
    ],
)
def test_an_index_of_another_form_is_made_again(shards, caplog, index):
    expected = targets_of(tar(shards))
    for file in (shards / ".index").iterdir():
        np.save(file, index)

    found = targets_of(tar(shards))

    assert found == expected
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
    val = shards / "val"
    val.mkdir()
    (val / "notes.txt").write_text("where they come from")
    (shards / "val.txt").write_text("a list")

    assert len(tar(shards, "val")) == 6


def test_a_pipe_is_no_shard(shards):
    os.mkfifo(shards / "train-002.tar")
    with pytest.raises(DataError, match=r"train-002\.tar: is a folder, pipe or device"):
        tar(shards)


def test_a_compressed_shard_stands_for_its_split(shards):
    (shards / "val").rename(shards / "validation")
    (shards / "val").mkdir()
    (shards / "val" / "0.tar.gz").write_bytes(b"")

    with pytest.raises(DataError, match="compressed"):
        tar(shards, "val")


def test_folds_share_train_out(shards):
    folds = [tar(shards, "val", fold=k, folds=4) for k in range(4)]
    rest = tar(shards, "train", fold=1, folds=4)

    assert sum(len(fold) for fold in folds) == len(tar(shards)) == 20
    assert len(rest) == 20 - len(folds[1])


def test_val_is_cut_from_train(shards):
    (shards / "val" / "0.tar").unlink()

    train = tar(shards, "train", val_fraction=0.3)
    val = tar(shards, "val", val_fraction=0.3)

    assert len(train) == 14
    assert len(val) == 6
    assert val.targets.bincount().tolist() == [2, 2, 2]


def test_a_url_is_read_alike(shards, tmp_path):
    memory = fsspec.filesystem("memory")
    for path in sorted(shards.glob("*.tar")):
        memory.pipe(f"/bucket/{path.name}", path.read_bytes())
    kept = tmp_path / "kept"

    data = tar("memory://bucket", cache_dir=str(kept), val_fraction=0.0)
    local = tar(shards, val_fraction=0.0)

    assert len(list(kept.iterdir())) == 2
    assert len(data) == len(local) == 20
    for index in range(20):
        image, _ = data[index]
        expected, _ = local[index]
        assert torch.equal(image, expected)
        _, _, name = data.path(index).rpartition("/")
        _, _, expected_name = local.path(index).rpartition("/")
        assert name == expected_name


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


def test_a_folder_without_shards_is_refused(shards):
    with pytest.raises(DataError, match="holds no shards"):
        tar(shards / "val")


def test_a_class_that_train_lacks_is_refused(shards):
    write(shards / "val" / "1.tar", sample(99, "7"))
    with pytest.raises(DataError, match=r"1\.tar:s0099.*class '7' is not among those of train"):
        tar(shards, "val")


def test_a_shard_that_became_another_file_is_refused(shards):
    data = tar(shards)
    (shards / "train-000.tar").write_bytes(b"\x1f\x8b no tar file")

    with pytest.raises(DataError, match="shorter than when it was indexed"):
        data[3]
    with pytest.raises(DataError, match="not an uncompressed tar"):
        tar(shards)


@pytest.mark.parametrize(
    ("name", "split"),
    [
        ("train-002.tar.gz", "train"),
        ("val-1.tgz", "val"),
        ("train/3.tar.xz", "train"),
        ("test.tar.zst", "test"),
    ],
)
def test_packed_shards_are_named_and_not_passed_over(shards, name, split):
    (shards / name).parent.mkdir(exist_ok=True)
    (shards / name).write_bytes(b"")
    (shards / "train-000.tar.md5").write_bytes(b"no shard")

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
    """A folder of the package `datasets`, with pictures of cats and dogs."""
    datasets = pytest.importorskip("datasets", reason="the extra huggingface is not installed")
    labels = datasets.ClassLabel(names=["cat", "dog"])
    features = datasets.Features({"image": datasets.Image(), "label": labels})
    images = [{"bytes": picture(number), "path": None} for number in range(10)]
    rows = {"image": images, "label": [number % 2 for number in range(10)]}
    table = datasets.Dataset.from_dict(rows, features=features)
    parts = datasets.DatasetDict({"train": table, "test": table.select([1, 2])})
    parts.save_to_disk(tmp_path / "d")
    return tmp_path / "d"


def hub(path, split="train", columns=COLUMNS, **options):
    return huggingface(str(path), split, columns, **options)


def test_images_of_datasets_are_decoded_as_files_are(arrow, tmp_path):
    test = hub(arrow, "test", val_fraction=0.4)
    in_worker = pickle.loads(pickle.dumps(test))

    image, target = in_worker[0]

    expected = decoded(picture(1), tmp_path)
    assert torch.equal(image, expected)
    assert target == 1


def test_a_tokenizer_that_is_not_there_is_an_error_of_the_configuration(arrow, tmp_path):
    pytest.importorskip("transformers", reason="the extra transformers is not installed")
    with pytest.raises(ConfigError, match=r"data\.tokenizer.*nowhere"):
        hub(arrow, tokenizer=str(tmp_path / "nowhere"))


def test_val_is_cut_from_train_of_datasets_or_a_fold_of_it(arrow):
    train = hub(arrow, "train", val_fraction=0.4)
    val = hub(arrow, "val", val_fraction=0.4)
    test = hub(arrow, "test", val_fraction=0.4)

    assert [len(train), len(val), len(test)] == [6, 4, 2]
    assert train.classes == ["cat", "dog"]
    assert val.targets.bincount().tolist() == [2, 2]
    assert train.fingerprint() != val.fingerprint()
    again = hub(arrow, val_fraction=0.4)
    assert train.fingerprint() == again.fingerprint()
    folds = [hub(arrow, split, fold=0, folds=5) for split in ("train", "val", "test")]
    assert [len(part) for part in folds] == [8, 2, 2]


@pytest.fixture
def lines(tmp_path):
    """A folder of three files of JSON lines: 30 rows with a vector, a number and a kind."""
    pytest.importorskip("datasets", reason="the extra huggingface is not installed")
    folder = tmp_path / "lines"
    folder.mkdir()
    for part in range(3):
        rows = []
        for number in range(part * 10, part * 10 + 10):
            row = {"x": [number + 0.5, 2.0], "y": number % 3, "kind": f"k{number % 2}"}
            rows.append(json.dumps(row))
        (folder / f"train-{part}.jsonl").write_text("\n".join(rows) + "\n")
    return folder


def stream_of(lines, **options):
    return Stream(streamed(str(lines), "train", NUMBERS, **options), 30)


def test_a_stream_that_is_not_shuffled_has_the_order_of_its_files(lines):
    plain = stream_of(lines)

    first_column = read(plain)[:, 0]
    assert first_column.tolist() == [number + 0.5 for number in range(30)]
    _, target = plain[7]
    assert int(target) == 1


def test_numbers_and_names_of_datasets_are_inputs_and_targets(lines):
    data = hub(lines, columns=NUMBERS, classification=False, val_fraction=0.0)
    named = hub(lines, columns={"input": "x", "target": "kind"}, val_fraction=0.0)

    inputs, target = data[4]
    assert inputs.tolist() == [4.5, 2.0]
    assert inputs.dtype == torch.float32
    assert target.item() == 1
    assert named.classes == ["k0", "k1"]
    assert targets_of(named, range(3)) == [0, 1, 0]


def test_a_stream_is_a_function_of_seed_and_epoch(lines):
    def opened():
        return stream_of(lines, seed=1, buffer=8)

    first = read(opened(), epoch=0)
    second = read(opened(), epoch=1)

    in_order = read(stream_of(lines))[:, 0]
    for rows in (first, second):
        assert torch.equal(rows[:, 0].sort().values, in_order)
    assert not torch.equal(first, second)
    resumed = read(opened(), epoch=1, start=2)
    assert torch.equal(resumed, second[12:])
    in_workers = read(opened(), workers=2, epoch=1)
    assert torch.equal(in_workers, second)
    both = opened()
    assert torch.equal(read(both, epoch=0), first)
    assert torch.equal(read(both, epoch=1), second)


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
