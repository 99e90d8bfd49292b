"""The recipe in YAML and the loop by hand take the same steps on the same batches."""

import copy

import pytest
import torch
from torch.nn.functional import cross_entropy

from examples.airbench import by_hand_gpu as airbench
from examples.airbench.network import Airbench
from regimen.conf.check import parse
from regimen.scripts.composition.compose import compose
from regimen.trainer.lr_schedulers.build import build_lr_schedule
from regimen.trainer.optimizers.optimizers import build_optimizers
from regimen.trainer.options import TrainerOptions
from regimen.trainer.targets.instantiate import instantiate
from regimen.trainer.tasks.classification import Classification
from regimen.trainer.trainer import Trainer

STEPS = 3
# For batches of 20, with which the recipe's own rates lead anywhere: differences would only grow.
_SGD = "optimizer.optimizers.sgd"
TAME = ["optimizer.lr=0.05", f"{_SGD}.lr=0.5", f"{_SGD}.param_groups.head.lr=5"]


@pytest.mark.parametrize("channels_last", [False, True])
def test_the_recipe_and_the_loop_by_hand_take_the_same_steps(channels_last):
    config = parse(
        compose(["--config-dir", "examples/airbench/conf", "experiment=airbench94", *TAME]).config
    )
    torch.manual_seed(0)
    model = Airbench(10, widths=(8, 16, 16))
    if channels_last:
        model = model.to(memory_format=torch.channels_last)
    other, first = copy.deepcopy(model), copy.deepcopy(model.state_dict())
    batches = [(torch.randn(20, 3, 32, 32), torch.randint(10, (20,))) for _ in range(STEPS)]

    optimizers = build_optimizers(model, config.optimizer)
    Trainer(
        model,
        Classification(10, instantiate(config.task["loss"])),
        optimizers,
        batches,
        lr_scheduler=build_lr_schedule(config.lr_scheduler, optimizers, STEPS, STEPS),
        callbacks={},
        options=TrainerOptions(max_epochs=1),
    ).fit()

    by_hand = airbench.Optimizers(config.optimizer, other, compiles=False)
    for step, (inputs, labels) in enumerate(batches):
        cross_entropy(other(inputs), labels, label_smoothing=0.2).backward()
        by_hand.step(1 - step / STEPS)

    for name, expected in other.state_dict().items():
        found, before = model.state_dict()[name], first[name]
        moved = (expected - before).float().norm()
        if not expected.is_floating_point() or not moved:
            assert torch.equal(found, expected), name
        else:  # the orthogonal matrices are computed in bfloat16
            assert (found - expected).norm() <= 0.05 * moved, name
    rates = [group.options["lr"] for group in optimizers.groups()]
    assert rates == pytest.approx([0, 0, 0], abs=1e-6)  # all fell alike


def test_the_orthogonal_matrix_is_nearly_one():
    for shape in ((8, 30), (30, 8)):
        values = torch.linalg.svdvals(airbench._orthogonal(torch.randn(shape), 8).float())
        assert values.min() > 0.5
        assert values.max() < 1.4
