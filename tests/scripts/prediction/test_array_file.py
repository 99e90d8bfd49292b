"""One array of all samples: whole under its name, with the rows of an interrupted command."""

import json

import numpy as np
import pytest
import torch
from safetensors import safe_open

from conf.errors import ConfigError
from scripts.prediction.array_file import ArrayFile
from scripts.prediction.options import take_options
from trainer.errors import CheckpointError

ROWS = torch.arange(12.0).reshape(6, 2)


def read(path):
    if path.suffix == ".npy":
        return np.load(path)
    with safe_open(path, "np") as file:
        assert list(file.keys()) == ["logits"]
        assert json.loads(file.metadata()["regimen"]) == {"step": 7}
        return file.get_tensor("logits")


def opened(path, written=0, samples=6):
    return ArrayFile(path, "logits", samples, {"step": 7}, written)


@pytest.mark.parametrize("name", ["a.npy", "a.safetensors"])
@pytest.mark.parametrize(
    ("killed", "renamed"),
    [
        pytest.param(False, False, id="whole"),
        pytest.param(True, False, id="killed"),
        pytest.param(True, True, id="killed-before-the-table"),
    ],
)
def test_rows_are_where_they_belong(tmp_path, name, killed, renamed):
    path = tmp_path / name
    file = opened(path)
    file.write([0, 1], [], torch.empty(0, 2))  # nothing of this batch could be read
    file.write([2, 3], [3], ROWS[3:4])
    assert not path.exists()
    if killed:
        file.close()
        if renamed:
            path.with_name(f"{name}.part").rename(path)
        file = opened(path, written=4)
    file.write([4, 5], [4, 5], ROWS[4:])
    file.finish()
    expected = ROWS.clone()
    expected[:3] = torch.nan
    np.testing.assert_array_equal(read(path), expected.numpy())
    assert [entry.name for entry in tmp_path.iterdir()] == [name]


def test_all_rows_written_it_only_needs_its_name(tmp_path):
    file = opened(tmp_path / "a.npy")
    file.write([*range(6)], [*range(6)], ROWS)
    file.close()
    opened(tmp_path / "a.npy", written=6).finish()
    np.testing.assert_array_equal(np.load(tmp_path / "a.npy"), ROWS.numpy())


def test_rows_of_another_array_are_not_gone_on_with(tmp_path):
    file = opened(tmp_path / "a.npy", samples=9)
    file.write([0], [0], ROWS[:1])
    file.close()
    file = opened(tmp_path / "a.npy", written=1)
    with pytest.raises(CheckpointError, match="leave out resume=auto"):
        file.write([1], [1], ROWS[1:2])


def test_two_commands_do_not_write_one_array(tmp_path):
    first, second = opened(tmp_path / "a.npy"), opened(tmp_path / "a.npy")
    first.write([0], [0], ROWS[:1])
    with pytest.raises(ConfigError, match="another process is writing"):
        second.write([0], [0], ROWS[:1])
    first.close()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.int64, torch.bool])
def test_types_are_kept_or_widened(tmp_path, dtype):
    values = ROWS.to(dtype)
    for name in ("a.npy", "a.safetensors"):
        file = opened(tmp_path / name)
        file.write([*range(6)], [*range(6)], values)
        file.finish()
        found = read(tmp_path / name)
        wide = torch.float32 if dtype == torch.bfloat16 else dtype
        assert found.dtype == values.to(wide).numpy().dtype
        np.testing.assert_array_equal(found, values.to(wide).numpy())


@pytest.mark.parametrize(
    ("more", "said"),
    [
        pytest.param({"save_to": "x.npy"}, "nothing to save", id="alone"),
        pytest.param({"save": "logits", "save_to": "x.pt"}, "none of .npy", id="suffix"),
        pytest.param({"save": "logits", "save_to": "no/x.npy"}, "no folder", id="folder"),
        pytest.param({"save": "logits"}, "overwrite=true", id="exists"),
    ],
)
def test_mistakes_are_told_before_anything_is_read(tmp_path, monkeypatch, more, said):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "config.yaml").touch()
    (tmp_path / "predictions.logits.npy").touch()
    given = {"run": str(tmp_path), "source": "test"}
    with pytest.raises(ConfigError, match=said):
        take_options({**given, **more})
    assert take_options({**given, "save": "logits", "overwrite": "true"}).array.name
