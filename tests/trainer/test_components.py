"""The parts of a training do their work without a Trainer, and a Trainer keeps those it has."""

import pytest
import torch

from regimen.trainer.callback import Hooks
from regimen.trainer.components.components import build_components
from regimen.trainer.evaluation import evaluate, predict
from regimen.trainer.tasks.classification import Classification
from regimen.trainer.update.updater import Updater
from toys import CLASSES, assert_equal, batches, normed, trainer_of

TASK = Classification(CLASSES)


def test_an_evaluation_needs_no_optimizer_and_no_training_data() -> None:
    data = batches(3)
    trained = trainer_of(TASK, data, model=normed(), val=data, precision="fp32")
    trained.fit()
    parts = build_components(normed(), TASK, precision="fp32")
    parts.model.load_state_dict(trained.model.state_dict())
    step = trained.state.global_step

    assert evaluate(parts, data, "val", step=step) == trained.evaluate()

    inputs = data[0][0]
    assert torch.equal(predict(parts, inputs, 8), trained.predict(inputs))
    assert not parts.optimizers.optimizers


def test_an_updater_needs_no_trainer() -> None:
    data = batches(2)
    trainer = trainer_of(TASK, data, model=normed(), precision="fp32", max_epochs=1)
    trainer.fit()
    model = normed()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    parts = build_components(model, TASK, optimizer, data, precision="fp32")
    updater = Updater(parts, Hooks([], None))

    for micro_batch in parts.train_loader.epoch(0):
        assert updater.apply([micro_batch])
    assert_equal(model, trainer.model, tolerance=0)


def test_no_part_of_a_trainer_can_be_replaced() -> None:
    trainer = trainer_of(TASK, batches(1), model=normed(), precision="fp32")
    for name in ("model", "options", "average", "hooks", "state", "run_dir", "draw"):
        with pytest.raises(AttributeError, match=name):
            setattr(trainer, name, object())

    trainer.metrics |= {"mine": 1.0}  # which changes the part itself
    trainer.note = "of a callback's own"
    assert trainer.metrics == {"mine": 1.0}


def test_two_trainers_do_not_share_their_options() -> None:
    first = trainer_of(TASK, batches(1), model=normed(), precision="fp32", max_epochs=1)
    second = trainer_of(TASK, batches(1), model=normed(), precision="fp32")
    options = first.options

    assert options is first.components.options

    first.fit(max_epochs=3)
    assert first.state.epoch == 3
    assert options.max_epochs == 3
    assert second.options.max_epochs == 2
