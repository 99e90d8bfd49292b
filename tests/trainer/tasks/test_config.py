"""What a configuration can get wrong about a task, found before anything is built."""

import pytest

from conf.check import parse
from conf.errors import ConfigError
from scripts.composition.compose import compose
from trainer.build.check import check_targets


def problems(*overrides: str) -> str:
    config = parse(compose(list(overrides)).config)
    with pytest.raises(ConfigError) as caught:
        check_targets(config)
    return str(caught.value)


@pytest.mark.parametrize(
    "override",
    [
        pytest.param("optimizer=adamw", id="one"),
        pytest.param("optimizer=muon", id="others"),
        pytest.param("task.turns=[discriminator]", id="one-has-no-turn"),
    ],
)
def test_each_optimizer_has_its_turn(override: str) -> None:
    found = problems("experiment=gan", override)
    assert "optimizer.optimizers" in found
    assert "task.turns" in found


@pytest.mark.parametrize(
    ("experiment", "metric", "meant"),
    [
        pytest.param("regression", "val/mea", "val/mae", id="regression"),
        pytest.param("multilabel", "val/f2", "val/f1", id="multilabel"),
        pytest.param("segmentation", "val/iou", "val/miou", id="segmentation"),
        pytest.param("char_lm", "val/perplexitiy", "val/perplexity", id="language"),
        pytest.param("gan", "val/fool", "val/fooled", id="gan"),
    ],
)
def test_a_metric_that_a_task_lacks_is_named(experiment: str, metric: str, meant: str) -> None:
    found = problems(f"experiment={experiment}", f"callbacks.early_stopping.monitor={metric}")
    assert "callbacks.early_stopping.monitor" in found
    assert f"did you mean {meant}?" in found


def test_values_of_a_class_can_be_monitored() -> None:
    line = ["experiment=resnet18", "task/metrics=per_class"]
    composed = compose([*line, "callbacks.checkpoint.monitor=val/accuracy_3"])
    check_targets(parse(composed.config))
    assert "val/accuracy_12" in problems(*line, "callbacks.checkpoint.monitor=val/accuracy_12")


def test_a_penalty_is_no_metric_of_validation() -> None:
    line = ["experiment=resnet18", "model=mlp", "task/loss=input_gradient_penalty"]
    found = problems(*line, "callbacks.checkpoint.monitor=val/loss_penalty")
    assert "val/loss_cross_entropy" in found
