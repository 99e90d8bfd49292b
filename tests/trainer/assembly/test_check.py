"""A check builds every part on stand-ins: mistakes are found without data, and all at once.

Single mistakes are rows of tests/mistakes.yaml.
"""

import functools
from collections.abc import Callable
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

LAMBDA = "lr_scheduler={_target_: torch.optim.lr_scheduler.LambdaLR, functions: my_own.fail}"


def check(*typed: str) -> None:
    check_targets(parse(compose(["experiment=resnet18", *typed]).config))


@pytest.mark.parametrize(
    "typed",
    [
        "model=mlp lr_scheduler=cosine +lr_scheduler/warmup=linear",
        "model=mlp data.cache=device",
        "model=mlp data.cache=device transforms=on_device",
        "experiment=segmentation data.cache=device",
        "task/metrics=per_class callbacks.checkpoint.monitor=val/accuracy_3",
    ],
)
def test_what_can_be_built_passes(typed: str) -> None:
    check(*typed.split())


def test_mistakes_in_all_parts_are_listed_together() -> None:
    with pytest.raises(ConfigError) as caught:
        check(
            "+model.activation=rellu",
            "task.loss={_target_: torch.nn.MultiMarginLoss, p: 3}",
            "callbacks.early_stopping.mode=medium",
            "+transforms.train.crop={_target_: torchvision.transforms.v2.RandomCrop, size: []}",
            "+transforms.device.flip={_target_: torchvision.transforms.v2.Resize, size: [1,2,3]}",
        )
    keys = {"model", "task.loss", "callbacks.early_stopping", "transforms.train.crop"}
    assert {problem.key for problem in caught.value.problems} == {*keys, "transforms.device.flip"}


def test_the_users_code_is_met_as_in_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_own.py").write_text(
        "import torch\nfrom trainer.callback import Callback\n"
        "def fail(step):\n    raise LookupError(step)\n"
        "class Short(Callback):\n    def scalars(self): ...\n"
        "class Filled(torch.nn.Linear):\n    def __init__(self):\n"
        "        super().__init__(2, 2)\n        self.first = self.weight.sum().item()\n"
        "class Odd(torch.nn.Linear):\n    def __init__(self):\n        raise OSError('no file')\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(LookupError):  # a fault in a function is no mistake in the configuration
        check("model=mlp", LAMBDA)
    with pytest.raises(ConfigError, match=r"callbacks\.short: Short\.scalars must take \(self, t"):
        check("model=mlp", "+callbacks.short={_target_: my_own.Short}")
    for network in ("Filled", "Odd"):  # the run builds it, with storage
        check(f"model={{_target_: my_own.{network}}}", "callbacks.ema=null")


def test_a_check_and_a_run_build_each_part_once(monkeypatch: pytest.MonkeyPatch) -> None:
    counts: dict[type, int] = {}

    def counted(cls: type, init: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(init)
        def construct(*args: Any, **kwargs: Any) -> None:
            counts[cls] = counts.get(cls, 0) + 1
            init(*args, **kwargs)

        return construct

    for cls in (MLP, Classification, torch.optim.SGD, Checkpoint, LRSchedule):
        monkeypatch.setattr(cls, "__init__", counted(cls, cls.__init__))
    config = parse(compose(["experiment=resnet18", "model=mlp", "optimizer=sgd"]).config)
    check_targets(config)
    build(config, Strategy("cpu"))
    # A schedule is tried on stand-ins first, since torch looks at few arguments.
    assert counts.pop(LRSchedule) <= 4
    assert counts == dict.fromkeys((MLP, Classification, torch.optim.SGD, Checkpoint), 2)


def test_an_open_number_of_classes_is_that_of_the_data() -> None:
    node = {"parts": [{"num_classes": None}], "num_classes": 3}
    assert with_classes(node, 7) == {"parts": [{"num_classes": 7}], "num_classes": 3}
    assert node["parts"] == [{"num_classes": None}]
