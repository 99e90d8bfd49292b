"""What version 0.1 named elsewhere is found by its old path."""

from importlib import import_module

import pytest

from scripts.composition.compose import compose
from scripts.runs.saved_config import saved_config
from trainer.targets.allow_list import locate
from trainer.targets.renamed import RENAMED, present_path, with_present_targets

OLD = [
    "data.views.StackViews",
    "trainer.confusion.MacroF1",
    "trainer.losses.vector",
    "trainer.muon.Muon",
    "trainer.penalties.GradientPenalty",
    "trainer.running.R2",
]


@pytest.mark.parametrize("path", OLD)
def test_an_old_path_leads_to_the_same_thing(path):
    assert locate(present_path(path)).__name__ == path.rpartition(".")[2]


def test_every_line_of_the_table_leads_somewhere():
    assert {path.rpartition(".")[0] for path in OLD} == set(RENAMED)
    assert all(import_module(module) for module in RENAMED.values())


def test_targets_are_renamed_wherever_they_stand():
    tree = {"a": [{"_target_": "trainer.muon.Muon", "name": "trainer.muon.Muon"}], "b": 1}
    present = {"_target_": "trainer.optimizers.muon.Muon", "name": "trainer.muon.Muon"}
    assert with_present_targets(tree) == {"a": [present], "b": 1}


def test_overrides_and_saved_configurations_are_read_with_present_paths():
    composed = compose(["model=mlp", "+task.metrics.f1._target_=trainer.confusion.MacroF1"])
    target = "trainer.tasks.metrics.MacroF1"
    assert composed.config["task"]["metrics"]["f1"]["_target_"] == target
    saved = saved_config({"config": "task: {loss: {_target_: trainer.losses.vector}}"}, None)
    assert saved["task"]["loss"]["_target_"] == "trainer.tasks.losses.vector"
