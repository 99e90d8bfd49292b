"""`evaluate`: what it refuses before a run is opened."""

import pytest

from regimen.conf.errors import ConfigError
from regimen.conf.yaml_file import dump
from regimen.scripts.composition.compose import compose
from regimen.scripts.evaluate import evaluate


@pytest.fixture
def run_dir(tmp_path):
    """Return a folder with the configuration of a run."""
    config = compose(["experiment=resnet18", "strategy=ddp"]).config
    (tmp_path / "config.yaml").write_text(dump(config | {"run_dir": None, "dry_run": None}))
    return tmp_path


@pytest.mark.parametrize(
    "words",
    [
        pytest.param(["strategy.name=ddp", "strategy.devices=2"], id="both"),
        pytest.param(["strategy=ddp"], id="a choice"),
        pytest.param(["+strategy=fsdp"], id="an added choice"),
        pytest.param(["strategy={name: ddp, devices: 2}"], id="a section"),
        pytest.param(["strategy.devices=2"], id="devices"),
        pytest.param(["strategy.devices=[0,1]"], id="numbers of devices"),
    ],
)
def test_several_processes_are_refused_in_one_line(run_dir, words):
    with pytest.raises(ConfigError, match="evaluate works in one process") as caught:
        evaluate([f"run={run_dir}", *words])
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("word", ["strategy.name=dp strategy.devices=2", "strategy=single"])
def test_one_process_is_not(run_dir, word):
    with pytest.raises(Exception, match="holds no such checkpoint"):
        evaluate([f"run={run_dir}", *word.split(), "strategy.accelerator=cpu"])


def test_a_run_has_no_groups_to_choose_in(run_dir):
    with pytest.raises(ConfigError, match=r"optimizer: config.yaml holds values.* optimizer\.KEY"):
        evaluate([f"run={run_dir}", "optimizer=adam"])
