"""Opening a run whose configuration cannot be read."""

import pytest

from trainer.inference.run import load_run
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
