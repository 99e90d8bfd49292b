"""What `mine.py` promises; `pytest` runs it."""

import torch
from mine import Classify, Net, Waves

from regimen import build, compose


def test_samples_fit_the_model() -> None:
    waves = Waves("train")
    inputs = torch.stack([waves[index][0] for index in range(4)])
    assert Net(num_classes=len(waves.classes))(inputs).shape == (4, 3)


def test_a_step_trains_every_parameter() -> None:
    model, waves = Net(num_classes=3), Waves("train")
    output = Classify().training_step(model, (waves.waves[:8], waves.targets[:8]))
    output.loss.backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_the_experiment_trains_two_updates() -> None:
    config = compose(["--config-dir", "conf", "experiment=mine", "trainer.max_steps=2"]).config
    trainer = build(config).trainer
    trainer.fit()
    assert trainer.state.global_step == 2
