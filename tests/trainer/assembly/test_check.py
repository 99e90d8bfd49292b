"""A check builds every part on stand-ins: mistakes are found without data, and all at once."""

import functools
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from callbacks.checkpoint import Checkpoint
from conf.check import parse
from conf.errors import ConfigError
from models.mlp import MLP
from scripts.composition.compose import compose
from trainer.assembly.check import check_targets
from trainer.assembly.experiment import build
from trainer.assembly.parts import with_classes
from trainer.lr_schedulers.schedule import LRSchedule
from trainer.strategies.strategy import Strategy
from trainer.tasks.classification import Classification

SGD = {"_target_": "torch.optim.SGD", "lr": 0.1}
LAMBDA = {"_target_": "torch.optim.lr_scheduler.LambdaLR"}


def checked(optimizer: dict[str, Any], schedule: dict[str, Any] | None) -> None:
    """Check a configuration with these nodes."""
    config = parse(compose(["experiment=resnet18", "model=mlp"]).config)
    check_targets(replace(config, optimizer=optimizer, lr_scheduler=schedule))


def test_what_can_be_built_passes() -> None:
    rules = {"biases": {"match": "bias$"}}
    cosine = {
        "_target_": "torch.optim.lr_scheduler.CosineAnnealingLR",
        "T_max": "${total_steps}",
        "warmup": {"epochs": 1},
    }
    checked({**SGD, "param_groups": rules}, cosine)
    checked(SGD, None)


@pytest.mark.parametrize(
    ("optimizer", "schedule", "found"),
    [
        pytest.param(
            {**SGD, "param_groups": {"a": {"match": "^x"}, "b": {"match": "^y"}}},
            None,
            {
                "optimizer.param_groups.a": "matches no parameter",
                "optimizer.param_groups.b": "matches no parameter",
            },
            id="rules",
        ),
        pytest.param(
            SGD,
            {**LAMBDA, "functions": {"norm": "1"}},
            {"lr_scheduler.functions.norm": "no parameter group"},
            id="function",
        ),
        pytest.param(
            SGD,
            {**LAMBDA, "functions": "1 / 0"},
            {"lr_scheduler.functions.default": "has no value"},
            id="expression",
        ),
        pytest.param(
            SGD,
            {**LAMBDA, "functions": "os.getcwd"},
            {"lr_scheduler.functions.default": "is not allowed"},
            id="refused-function",
        ),
        pytest.param({**SGD, "lr": -1}, None, {"optimizer": "Invalid learning rate"}, id="lr"),
    ],
)
def test_what_cannot_be_built_is_told_with_its_key(
    optimizer: dict[str, Any], schedule: dict[str, Any] | None, found: dict[str, str]
) -> None:
    with pytest.raises(ConfigError) as caught:
        checked(optimizer, schedule)
    problems = {problem.key: problem.message for problem in caught.value.problems}
    assert problems.keys() == found.keys()
    assert all(text in problems[key] for key, text in found.items())


def test_a_schedule_over_a_length_that_nothing_gives_is_found_before_data_are_read() -> None:
    line = ["experiment=resnet18", "trainer.max_epochs=null", "trainer.max_time=60"]
    with pytest.raises(ConfigError, match="length of the run, which is not known"):
        check_targets(parse(compose(line).config))


def test_mistakes_in_all_parts_are_listed_together() -> None:
    line = [
        "experiment=resnet18",
        "+model.activation=rellu",
        "+task.loss.label_smoothing=3",
        "callbacks.early_stopping.mode=medium",
        "+transforms.train.crop={_target_: torchvision.transforms.v2.RandomCrop, size: [1, 2, 3]}",
    ]
    with pytest.raises(ConfigError) as caught:
        check_targets(parse(compose(line).config))
    keys = {problem.key for problem in caught.value.problems}
    assert {"model", "task.loss", "callbacks.early_stopping", "transforms.train.crop"} <= keys


def test_a_fault_in_a_users_function_is_not_a_mistake_in_the_config(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = ("def fail(step):", "    raise LookupError(step)", "")
    (tmp_path / "faulty_schedules.py").write_text("\n".join(lines))
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(LookupError):
        checked(SGD, {**LAMBDA, "functions": "faulty_schedules.fail"})


def test_a_loss_that_cannot_be_built_hides_no_other_mistake() -> None:
    loss = "task.loss={_target_: torch.nn.MultiMarginLoss, p: 3}"
    with pytest.raises(ConfigError) as caught:
        check_targets(parse(compose(["experiment=resnet18", loss, "+model.activation=no"]).config))
    assert {problem.key for problem in caught.value.problems} == {"task.loss", "model"}


class Counts:
    """Count how often classes are constructed."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *classes: type) -> None:
        self.of = dict.fromkeys(classes, 0)
        for cls in classes:
            monkeypatch.setattr(cls, "__init__", self._counted(cls, cls.__init__))

    def _counted(self, cls: type, init: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(init)
        def construct(*args: Any, **kwargs: Any) -> None:
            self.of[cls] += 1
            init(*args, **kwargs)

        return construct


def test_a_check_and_a_run_build_each_part_once(monkeypatch: pytest.MonkeyPatch) -> None:
    counts = Counts(monkeypatch, MLP, Classification, torch.optim.SGD, Checkpoint, LRSchedule)
    config = parse(compose(["experiment=resnet18", "model=mlp", "optimizer=sgd"]).config)
    check_targets(config)
    build(config, Strategy("cpu"))
    assert counts.of[MLP] == 2
    assert counts.of[Classification] == 2
    assert counts.of[torch.optim.SGD] == 2
    assert counts.of[Checkpoint] == 2
    # A schedule is tried on stand-ins first, since torch looks at few arguments.
    assert counts.of[LRSchedule] <= 4


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
    assert f"{key}: has no effect on the gradients that LBFGS" in str(caught.value)


@pytest.mark.parametrize(
    "part", ["transforms.train.crop", "transforms.device.mix", "callbacks.ema"]
)
def test_a_part_without_a_target_is_named(part: str) -> None:
    with pytest.raises(ConfigError, match=rf"{re.escape(part)}\._target_: missing"):
        compose(["experiment=resnet18", f"{part}.size=40"])


def test_a_hook_with_wrong_parameters_is_a_mistake_in_the_configuration(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = ("from trainer.callback import Callback", "class Short(Callback):")
    (tmp_path / "my_short.py").write_text("\n".join([*lines, "    def scalars(self): ..."]))
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    line = ["experiment=resnet18", "model=mlp", "+callbacks.short={_target_: my_short.Short}"]
    message = r"callbacks\.short: Short\.scalars must take \(self, trainer\)"
    with pytest.raises(ConfigError, match=message):
        check_targets(parse(compose(line).config))


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


def test_an_open_number_of_classes_is_that_of_the_data() -> None:
    node = {"parts": [{"num_classes": None}], "num_classes": 3}
    assert with_classes(node, 7) == {"parts": [{"num_classes": 7}], "num_classes": 3}
    assert node["parts"] == [{"num_classes": None}]
