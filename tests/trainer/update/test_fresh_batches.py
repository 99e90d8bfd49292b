"""Turns that have a batch each: five steps of a critic on five batches, then one of a generator."""

import copy
import logging
from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import toys
from regimen.callbacks.progress import Progress
from regimen.trainer.assembly.experiment import build
from regimen.trainer.callback import Callback
from regimen.trainer.errors import DivergedError, ModelError
from regimen.trainer.optimizers.optimizers import build_optimizers
from regimen.trainer.options import GradientNoise, TrainerOptions
from regimen.trainer.strategies.strategy import Strategy
from regimen.trainer.task import StepOutput, Task
from regimen.trainer.trainer import Trainer
from toys import Log, Samples, assert_equal, composed, in_group, loader, points

TURNS = ("critic", "critic", "generator")
BATCH = 4
SAMPLES = 46  # 12 batches, the last of 2: 4 updates of an epoch
SGD = {"_target_": "torch.optim.SGD", "lr": 0.05, "momentum": 0.5}
NODE = {"optimizers": {n: {**SGD, "params": {"match": f"^{n}"}} for n in ("critic", "generator")}}


class Networks(nn.Module):
    """A critic and a generator of points."""

    def __init__(self) -> None:
        super().__init__()
        self.critic = nn.Sequential(nn.Linear(toys.FEATURES, 6), nn.Tanh(), nn.Linear(6, 1))
        self.generator = nn.Linear(3, toys.FEATURES)

    def forward(self, x: Tensor, part: str) -> Tensor:
        """Call one of the two."""
        answer: Tensor = getattr(self, part)(x)
        return answer


def loss_of(critic: Any, generator: Any, x: Tensor, turn: str, slope: bool = True) -> Tensor:
    """Return the loss of WGAN-GP of each sample; what stands for noise is a function of it."""
    noise = x[:, :3].roll(1, 1)
    made = generator(noise)
    if turn == "generator":
        return -critic(made)[:, 0]
    mixed = (x + made.detach()) / 2
    mixed.requires_grad_()
    (gradient,) = torch.autograd.grad(critic(mixed).sum(), mixed, create_graph=True)
    penalty = (gradient.norm(dim=1) - 1).square()
    return critic(made.detach())[:, 0] - critic(x)[:, 0] + 10 * penalty


class Wasserstein(Task):
    """WGAN-GP."""

    fresh_batches = True

    def __init__(self, turns: Sequence[str] = TURNS) -> None:
        self.turns = turns
        self.seen: list[Any] = []

    def turn_step(self, model: nn.Module, batch: Any, turn: str, index: int = -1) -> StepOutput:
        self.seen.append((index, turn, batch[0]))
        critic = partial(model, part="critic")
        loss = loss_of(critic, partial(model, part="generator"), batch[0], turn)
        return StepOutput(loss.mean())

    def evaluation_step(self, model: nn.Module, batch: Any) -> StepOutput:
        return StepOutput(batch[0].mean())


def networks() -> Networks:
    torch.manual_seed(1)
    return Networks().double()


def data_of(samples: int = SAMPLES) -> Samples:
    return points(samples)


def make(
    task: Task | None = None,
    steps: int = 1,
    strategy: Strategy | None = None,
    samples: int = SAMPLES,
    **options: Any,
) -> Trainer:
    model = networks()
    callbacks = options.pop("callbacks", None)
    return Trainer(
        model if strategy is None else strategy.prepare(model),
        task or Wasserstein(),
        build_optimizers(model, copy.deepcopy(NODE)),
        loader(data_of(samples), steps, batch=BATCH, strategy=strategy),
        strategy=strategy,
        callbacks=callbacks,
        options=TrainerOptions(**{"max_epochs": 2, **options}),
        verbose=False,
    )


def batches_of(epoch: int, samples: int = SAMPLES) -> list[Tensor]:
    """Return the batches of an epoch by plain indexing: consecutive samples of its order."""
    data = data_of(samples)
    order = toys.Shuffled(len(data), seed=1)(epoch)
    return [data.x[torch.as_tensor(order[i : i + BATCH])] for i in range(0, len(order), BATCH)]


def by_hand(epochs: int = 2) -> Networks:
    model = networks()
    parameters = {"critic": model.critic.parameters(), "generator": model.generator.parameters()}
    optimizers = {n: torch.optim.SGD(p, lr=0.05, momentum=0.5) for n, p in parameters.items()}
    for epoch in range(epochs):
        batches = iter(batches_of(epoch))
        for _ in range(4):
            for turn in TURNS:
                model.zero_grad()
                loss_of(model.critic, model.generator, next(batches), turn).mean().backward()
                optimizers[turn].step()
    return model


def trained(strategy: Strategy | None, steps: int) -> nn.Module:
    trainer = make(steps=steps, strategy=strategy)
    trainer.fit()
    return trainer.model


def test_each_turn_has_the_next_batch_by_any_number_of_micro_batches_and_processes(
    ranks: Any,
) -> None:
    wanted = by_hand()
    for steps in (1, 2, 4):
        assert_equal(trained(None, steps), wanted, 1e-11)
    for model in ranks(2, in_group(partial(trained, steps=3))):
        assert_equal(model, wanted, 1e-11)


def test_a_turn_knows_its_number_and_what_is_left_at_the_end_is_left_out() -> None:
    task = Wasserstein()
    trainer = make(task, samples=45 + 4 + 2)  # 13 batches
    trainer.fit(max_epochs=1)

    assert trainer.steps_per_epoch == 4
    assert [(index, turn) for index, turn, _ in task.seen] == 4 * [*enumerate(TURNS)]
    for (_, _, seen), wanted in zip(task.seen, batches_of(0, 51), strict=False):
        assert torch.equal(seen, wanted)
    assert trainer.state.updates == 4
    assert trainer.state.samples == 48


def test_a_plain_data_loader_gives_each_turn_a_batch_too() -> None:
    data = [(x, x) for x in batches_of(0)]
    task = Wasserstein()
    model = networks()
    trainer = Trainer(model, task, build_optimizers(model, copy.deepcopy(NODE)), data)
    trainer.fit()

    for (_, _, s), (w, _) in zip(task.seen, data, strict=True):
        assert torch.equal(s, w)


class Keeping(Callback):
    """Keep the state at an update."""

    def __init__(self, update: int) -> None:
        self.update = update
        self.seen: list[Any] = []

    def on_update_end(self, trainer: Trainer, batch: Any, outputs: Any) -> None:
        self.seen.append((len(batch[0]), len(outputs)))

    def on_boundary(self, trainer: Trainer) -> None:
        if trainer.state.updates == self.update:
            self.kept = copy.deepcopy(trainer.state_dict())


@pytest.mark.parametrize("update", [1, 3, 4, 6])
@pytest.mark.parametrize("limit", [None, 8])
def test_a_resume_is_exact(update: int, limit: int | None) -> None:
    keeping = Keeping(update)
    options = {"limit_train_batches": limit, "max_epochs": 4 if limit else 2}
    whole = make(callbacks=[keeping], **options)
    whole.fit()

    assert whole.steps_per_epoch == (2 if limit else 4)

    resumed = make(**options)
    assert resumed.load_state_dict(keeping.kept) == []

    resumed.fit()
    assert_equal(resumed.model, whole.model, 0)
    assert set(keeping.seen) <= {(12, 3), (10, 3)}  # the samples and outputs of all turns


def test_a_resume_with_another_batch_size_goes_on_behind_what_was_seen() -> None:
    keeping = Keeping(1)
    make(callbacks=[keeping]).fit()
    task = Wasserstein()
    model = networks()
    trainer = Trainer(
        model,
        task,
        build_optimizers(model, copy.deepcopy(NODE)),
        loader(data_of(), batch=5),  # of the 34 samples that are left 7 batches: 2 updates
        options=TrainerOptions(max_epochs=1),
        verbose=False,
    )
    trainer.load_state_dict(keeping.kept)
    trainer.fit()
    order = toys.Shuffled(SAMPLES, seed=1)(0)
    seen = torch.cat([x for _, _, x in task.seen])
    rest = data_of().x[torch.as_tensor(order[12:])]

    assert trainer.state.updates == 3
    assert len(seen) in (29, 30)
    for row in seen:
        assert (rest == row).all(1).any()
    assert len(seen.unique(dim=0)) == len(seen)


def test_all_turns_share_a_batch_without_it() -> None:
    task = Wasserstein()
    task.fresh_batches = False
    trainer = make(task)
    trainer.fit(max_epochs=1)

    assert trainer.steps_per_epoch == 12
    for number, batch in enumerate(batches_of(0)):
        for _, _, x in task.seen[3 * number : 3 * number + 3]:
            assert torch.equal(x, batch)


def test_too_few_batches_for_one_update_are_refused() -> None:
    with pytest.raises(ModelError, match=r"3 turns of an update a batch .* an epoch has 2"):
        make(samples=8).fit()


def test_a_nan_in_one_turns_batch_is_told_by_its_sample_and_undoes_all_turns() -> None:
    data = data_of()
    bad = int(toys.Shuffled(SAMPLES, seed=1)(0)[5])  # in the second turn
    data.x[bad] = float("nan")
    model = networks()
    trainer = Trainer(
        model,
        Wasserstein(),
        build_optimizers(model, copy.deepcopy(NODE)),
        loader(data, batch=BATCH),
        options=TrainerOptions(max_epochs=1),
        verbose=False,
    )

    with pytest.raises(DivergedError, match=f"sample {bad} holds NaN"):
        trainer.fit()
    assert_equal(trainer.model, networks(), 0)


def test_a_turn_that_comes_again_has_noise_of_its_own() -> None:
    """The steps of the same turn would else go the same way."""

    class Kept(Callback):
        def __init__(self) -> None:
            self.noises: list[Tensor] = []

        def on_gradients(self, trainer: Trainer) -> None:
            gradient = trainer.model.critic[0].weight.grad
            self.noises.append(torch.zeros(1) if gradient is None else gradient.clone())

    class Still(Wasserstein):
        def turn_step(self, model: nn.Module, batch: Any, turn: str) -> Any:  # type: ignore[override]
            return StepOutput(0 * sum(p.sum() for p in getattr(model, turn).parameters()))

    kept = Kept()
    noise = GradientNoise(eta=0.1, gamma=0.5)
    make(Still(), callbacks=[kept], gradient_noise=noise, limit_train_batches=3).fit(max_epochs=1)
    first, second, _ = kept.noises

    assert first.any()
    assert not torch.equal(first, second)


def test_the_losses_of_all_turns_stand_in_the_terminals_line(
    caplog: pytest.LogCaptureFixture,
) -> None:
    log = Log()
    trainer = make(callbacks=[Progress(), log], log_every_n_steps=1)
    with caplog.at_level(logging.INFO):
        trainer.fit(max_epochs=1)
    line = caplog.text

    assert "train/epoch_loss_critic" in line
    assert "train/epoch_loss_generator" in line
    assert len(log.of("train/loss_critic")) == 4


def test_a_configuration_knows_the_length_of_its_run() -> None:
    config = composed(
        "experiment=gan",
        "model.width=2",
        "task.turns=[discriminator,discriminator,generator]",
        "task.fresh_batches=true",
        "loader.batch_size=100",
        "lr_scheduler=cosine",
        "trainer.max_epochs=2",
    )
    experiment = build(config)
    trainer = experiment.trainer

    assert len(trainer.train_loader) == 13
    assert trainer.steps_per_epoch == 4
    assert trainer.total_steps == 8
