"""Opening a run with files that cannot be read."""

import pytest

from trainer.checkpoints.archive import DamagedCheckpointError
from trainer.inference.run import load_run, load_trainer
from trainer.runs.status import RunDirectoryError


@pytest.mark.parametrize(
    ("content", "text"),
    [
        pytest.param(b"\xff\xfe{{:", "cannot read .*config.yaml: 'utf-8' codec", id="no-text"),
        pytest.param(b"", "config.yaml holds no configuration", id="empty"),
    ],
)
def test_a_damaged_configuration_is_named_with_the_way_out(tmp_path, content, text):
    (tmp_path / "config.yaml").write_bytes(content)
    with pytest.raises(RunDirectoryError, match=f"{text}.*resume=auto restores it"):
        load_run(tmp_path)


def test_for_a_damaged_checkpoint_the_others_are_named(tmp_path):
    (tmp_path / "checkpoints").mkdir()
    for name in ("best", "last", "step-00000005"):
        (tmp_path / "checkpoints" / f"{name}.pt").write_bytes(b"x")
    with pytest.raises(DamagedCheckpointError, match="=NAME takes another of best, last, step-0"):
        load_trainer(tmp_path, None, None, None, "best")
