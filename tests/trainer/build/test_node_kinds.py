"""Nodes that make something else than their section takes: exit 2, before anything is built."""

import pytest

from conf.check import parse
from conf.errors import ConfigError
from scripts.composition.compose import compose
from trainer.build.check import check_targets
from trainer.build.node_kinds import kind_of


@pytest.mark.parametrize(
    ("override", "key", "text"),
    [
        pytest.param(
            "+callbacks.x={_target_: torch.nn.Identity}",
            "callbacks.x",
            "no trainer.callback.Callback but a torch.nn",
            id="callback",
        ),
        pytest.param(
            "+callbacks.x={_target_: torch.nn.functional.relu, input: 1, _partial_: true}",
            "callbacks.x",
            "no trainer.callback.Callback",
            id="partial-callback",
        ),
        pytest.param(
            "loader.sampler={_target_: torch.nn.Linear, in_features: 1, out_features: 1}",
            "loader.sampler",
            "makes no sampler",
            id="sampler",
        ),
        pytest.param(
            "loader.batch_sampler={_target_: torch.nn.Identity}",
            "loader.batch_sampler",
            "makes no batch sampler",
            id="batch-sampler",
        ),
        pytest.param(
            "lr_scheduler={_target_: torch.optim.SGD, lr: 1}",
            "lr_scheduler",
            "no torch.optim.lr_scheduler",
            id="scheduler",
        ),
        pytest.param("task={_target_: torch.nn.Identity}", "task", "no trainer.task", id="task"),
        pytest.param(
            "model={_target_: data.transforms.ToFloat}", "model", "no torch.nn.Module", id="model"
        ),
        pytest.param(
            "optimizer._target_=torch.nn.Identity", "optimizer", "no torch.optim", id="optimizer"
        ),
        pytest.param(
            "data.test={_target_: torch.nn.ReLU}", "data.test", "makes no data set", id="data"
        ),
    ],
)
def test_a_node_of_the_wrong_kind_is_named(override: str, key: str, text: str) -> None:
    changes = ["experiment=resnet18", "model=mlp", override]
    config = parse(compose(changes).config)
    with pytest.raises(ConfigError) as caught:
        check_targets(config)
    (problem,) = [p for p in caught.value.problems if p.key == f"{key}._target_"]
    assert text in problem.message


def test_the_sections_have_kinds() -> None:
    assert kind_of("optimizer.optimizers.body.lr_scheduler") is kind_of("lr_scheduler")
    assert kind_of("transforms.train.crop") is kind_of("transforms.eval.crop")
    assert kind_of("nothing") is None
