"""Weights for other programs: written whole, tied ones included."""

import pytest
import torch

from trainer import safetensors_file
from trainer.archive import DamagedCheckpointError
from trainer.checkpoint import model_only
from trainer.errors import CheckpointError
from trainer.safetensors_file import read_safetensors, write_safetensors

needs_package = pytest.mark.skipif(
    not safetensors_file.is_available(), reason="the optional package safetensors is not installed"
)


@needs_package
def test_weights_come_back(tmp_path):
    tied = torch.randn(3, 4)
    write_safetensors(tmp_path / "best.safetensors", {"a": tied, "b": tied, "c": tied.T})
    loaded = model_only(tmp_path / "best.safetensors")
    assert torch.equal(loaded["a"], tied)
    assert torch.equal(loaded["b"], tied)
    assert torch.equal(loaded["c"], tied.T)


@needs_package
def test_damage_is_named(tmp_path):
    path = tmp_path / "best.safetensors"
    path.write_bytes(b"\x00" * 20)
    with pytest.raises(DamagedCheckpointError, match=r"best\.safetensors"):
        read_safetensors(path)


def test_without_the_package_it_is_said_what_is_missing(tmp_path, monkeypatch):
    monkeypatch.setattr(safetensors_file, "is_available", lambda: False)
    for attempt in (read_safetensors, lambda path: write_safetensors(path, {})):
        with pytest.raises(CheckpointError, match="needs the package safetensors"):
            attempt(tmp_path / "best.safetensors")
    assert list(tmp_path.iterdir()) == []
