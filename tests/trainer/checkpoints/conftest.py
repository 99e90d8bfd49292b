"""A store in a new folder."""

import pytest

from trainer.checkpoints.store import CheckpointStore


@pytest.fixture
def store(tmp_path):
    return CheckpointStore(tmp_path / "checkpoints")
