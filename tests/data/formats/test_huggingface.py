"""Data sets of the package `datasets`; made here, nothing is downloaded."""

import io
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from data.decode import read_image
from data.errors import DataError
from data.formats.huggingface import huggingface

datasets = pytest.importorskip("datasets", reason="the extra huggingface is not installed")
COLUMNS = {"input": "image", "target": "label"}


def picture(number: int) -> bytes:
    pixels = np.random.default_rng(number).integers(256, size=(9, 8, 3), dtype=np.uint8)
    content = io.BytesIO()
    Image.fromarray(pixels).save(content, "JPEG")
    return content.getvalue()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    features = datasets.Features(
        {"image": datasets.Image(), "label": datasets.ClassLabel(names=["cat", "dog"])}
    )
    rows = {
        "image": [{"bytes": picture(n), "path": None} for n in range(10)],
        "label": [n % 2 for n in range(10)],
    }
    table = datasets.Dataset.from_dict(rows, features=features)
    datasets.DatasetDict({"train": table, "test": table.select([1, 2])}).save_to_disk(
        tmp_path / "d"
    )
    return tmp_path / "d"


def opened(path: Path, split: str = "train", columns=COLUMNS, **options):
    return huggingface(str(path), split, columns, **options)


def test_images_are_decoded_as_files_are(folder: Path, tmp_path: Path) -> None:
    train, val, test = (opened(folder, s, val_fraction=0.4) for s in ("train", "val", "test"))
    assert [len(data) for data in (train, val, test)] == [6, 4, 2]
    assert train.classes == ["cat", "dog"]
    assert val.targets.bincount().tolist() == [2, 2]
    (tmp_path / "image").write_bytes(picture(1))
    image, target = test[0]
    assert torch.equal(image, read_image(tmp_path / "image"))
    assert target == 1
    assert torch.equal(pickle.loads(pickle.dumps(test))[0][0], image)
    assert train.fingerprint() != val.fingerprint()
    assert train.fingerprint() == opened(folder, val_fraction=0.4).fingerprint()


def test_files_and_numbers(tmp_path: Path) -> None:
    (tmp_path / "train.jsonl").write_text(
        '{"x": [1.0, 2.0], "y": 3.5}\n{"x": [4.0, 5.0], "y": 1}\n'
    )
    columns = {"input": "x", "target": "y"}
    data = opened(tmp_path, columns=columns, classification=False, val_fraction=0.0)
    inputs, target = data[0]
    assert inputs.tolist() == [1.0, 2.0]
    assert target.dtype == torch.float32
    assert target.item() == 3.5


def test_names_are_classes_in_order(tmp_path: Path) -> None:
    (tmp_path / "train.csv").write_text("x,kind\n1,pear\n2,apple\n3,pear\n")
    data = opened(tmp_path, columns={"input": "x", "target": "kind"}, val_fraction=0.0)
    assert data.classes == ["apple", "pear"]
    assert [data[i][1] for i in range(3)] == [1, 0, 1]


def test_mistakes_are_named(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="has no column 'picture'; it has 'image', 'label'"):
        opened(folder, columns={"input": "picture"})
    with pytest.raises(DataError, match=r"data\.columns\.inputs: unknown"):
        opened(folder, columns={"inputs": "image"})
    with pytest.raises(DataError, match=r"data\.path="):
        opened(tmp_path / "absent" / "really" / "not")


def test_folds_are_shared_out_of_train(folder: Path) -> None:
    folds = [opened(folder, "val", fold=k, folds=5) for k in range(5)]
    assert [one.targets.bincount().tolist() for one in folds] == [[1, 1]] * 5
    assert len(opened(folder, "train", fold=0, folds=5)) == 8
    assert len(opened(folder, "test", fold=0, folds=5)) == 2
