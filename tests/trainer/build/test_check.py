"""Mistakes in rules and schedules are found on a model without data, and all at once."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from conf.check import parse
from conf.errors import ConfigError
from scripts.composition.compose import compose
from trainer.build.check import check_targets
from trainer.build.trial import check_optimization
from trainer.optimizers.param_groups import ParamGroupError

SGD = {"_target_": "torch.optim.SGD", "lr": 0.1}
LAMBDA = {"_target_": "torch.optim.lr_scheduler.LambdaLR"}


def network() -> nn.Module:
    with torch.device("meta"):
        return nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2))


def test_what_can_be_built_passes() -> None:
    rules = {"norm": {"module": "norm"}}
    cosine = {
        "_target_": "torch.optim.lr_scheduler.CosineAnnealingLR",
        "T_max": "${total_steps}",
        "warmup": {"epochs": 1},
    }
    check_optimization(network(), {**SGD, "param_groups": rules}, cosine)
    check_optimization(network(), SGD, None)


@pytest.mark.parametrize(
    ("optimizer", "schedule", "messages"),
    [
        pytest.param(
            {**SGD, "param_groups": {"a": {"match": "x"}, "b": {"match": "y"}}},
            None,
            ["2 problems", "param_groups.a matches no", "param_groups.b matches no"],
            id="rules",
        ),
        pytest.param(
            SGD, {**LAMBDA, "functions": {"norm": "1"}}, ["no parameter group"], id="function"
        ),
        pytest.param(SGD, {**LAMBDA, "functions": "1 / 0"}, ["has no value"], id="expression"),
        pytest.param({**SGD, "lr": -1}, None, ["Invalid learning rate"], id="argument"),
    ],
)
def test_what_cannot_be_built_is_told(
    optimizer: dict[str, Any], schedule: dict[str, Any] | None, messages: list[str]
) -> None:
    with pytest.raises(ParamGroupError) as caught:
        check_optimization(network(), optimizer, schedule)
    assert [m for m in messages if m not in str(caught.value)] == []


def test_a_fault_in_a_users_function_is_not_a_mistake_in_the_config(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = ("def fail(step):", "    raise LookupError(step)", "")
    (tmp_path / "faulty_schedules.py").write_text("\n".join(lines))
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(LookupError):
        check_optimization(network(), SGD, {**LAMBDA, "functions": "faulty_schedules.fail"})


@pytest.mark.parametrize(
    ("override", "key"),
    [
        pytest.param("trainer.precision=fp16", "trainer.precision", id="fp16"),
        pytest.param("trainer.clip_grad_norm=1.0", "trainer.clip_grad_norm", id="norm"),
        pytest.param("trainer.clip_grad_value=0.1", "trainer.clip_grad_value", id="value"),
        pytest.param("+trainer.gradient_noise.eta=0.1", "trainer.gradient_noise", id="noise"),
    ],
)
def test_what_lbfgs_would_ignore_is_a_mistake(override: str, key: str) -> None:
    line = ["experiment=resnet18", "model=mlp", "optimizer=lbfgs"]
    check_targets(parse(compose(line).config))
    with pytest.raises(ConfigError) as caught:
        check_targets(parse(compose([*line, override]).config))
    assert f"{key}: cannot reach the gradients that LBFGS" in str(caught.value)
