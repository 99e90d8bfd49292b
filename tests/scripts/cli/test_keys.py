"""The keys of commands on a finished run."""

import pytest

from scripts.cli.keys import misspelt


@pytest.mark.parametrize(
    ("override", "meant"),
    [
        pytest.param("chekpoint=best", ["did you mean checkpoint?"], id="near"),
        pytest.param("loader.batch_size=4", [], id="of-the-configuration"),
        pytest.param("transforms=none", [], id="a-group"),
        pytest.param("models=mlp", [], id="nearer-to-another"),
        pytest.param("+extra=1", [], id="far"),
    ],
)
def test_a_key_that_is_nearly_one_of_a_command_is_told(override: str, meant: list[str]) -> None:
    assert [p.hint for p in misspelt([override], ["run", "checkpoint", "split"])] == meant
