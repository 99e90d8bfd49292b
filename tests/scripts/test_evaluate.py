"""`evaluate`: how many processes it starts, and what it refuses before a run is opened."""

import pytest

from regimen.conf.errors import ConfigError
from regimen.conf.yaml_file import dump
from regimen.scripts.composition.compose import compose
from regimen.scripts.evaluate import evaluate
from regimen.scripts.runs import launch
from regimen.trainer.errors import CheckpointError


@pytest.fixture
def run_dir(tmp_path):
    """Return a folder with the configuration of a run."""
    config = compose(["experiment=resnet18", "strategy=ddp"]).config
    (tmp_path / "config.yaml").write_text(dump(config | {"run_dir": None, "dry_run": None}))
    return tmp_path


@pytest.mark.parametrize(
    ("words", "starts"),
    [
        pytest.param(["strategy.name=ddp", "strategy.devices=2"], True, id="both"),
        pytest.param(["strategy=ddp"], True, id="a choice"),
        pytest.param(["strategy={name: ddp, devices: 2}"], True, id="a section"),
        pytest.param(["strategy.devices=2"], True, id="devices of a strategy that the run has"),
        pytest.param(["strategy=single"], False, id="one"),
        pytest.param(["strategy.accelerator=cpu"], False, id="a device"),
        pytest.param([], False, id="none, of a run of several processes"),
    ],
)
def test_several_processes_are_started_where_they_are_asked_for(
    run_dir, monkeypatch, words, starts
):
    started = []
    monkeypatch.setattr(launch, "launch", lambda request: started.append(request.evaluation) or 0)
    if starts:
        assert evaluate([f"run={run_dir}", *words]) == 0
        assert [keys["run"] for keys in started] == [str(run_dir)]
    else:
        with pytest.raises(CheckpointError, match="holds no such checkpoint"):
            evaluate([f"run={run_dir}", *words])
        assert not started


@pytest.mark.parametrize("word", ["strategy=ddp", "strategy.devices=2"])
def test_a_file_is_tested_in_one_process(run_dir, word):
    with pytest.raises(ConfigError, match="artefact: a file is tested in one process"):
        evaluate([f"run={run_dir}", word, "artefact=model.onnx"])


@pytest.mark.parametrize("word", ["strategy.name=dp strategy.devices=2", "strategy=single"])
def test_one_process_is_not(run_dir, word):
    with pytest.raises(Exception, match="holds no such checkpoint"):
        evaluate([f"run={run_dir}", *word.split(), "strategy.accelerator=cpu"])


def test_a_run_has_no_groups_to_choose_in(run_dir):
    with pytest.raises(ConfigError, match=r"optimizer: config.yaml holds values.* optimizer\.KEY"):
        evaluate([f"run={run_dir}", "optimizer=adam"])
