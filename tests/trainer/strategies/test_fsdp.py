"""Shards train as the whole does with every optimizer, and are saved and resumed as the whole."""

from collections import OrderedDict
from functools import partial

import pytest
import torch
from torch import nn

import toys
from callbacks.checkpoint import Checkpoint
from callbacks.ema import EMA
from scripts.convert import convert
from toys import StopAt, blocks, leaves, loaders, through_a_file
from trainer import snapshot
from trainer.checkpoints import shards as checkpoint_shards
from trainer.checkpoints.reader import read_checkpoint
from trainer.errors import CheckpointError
from trainer.optimizers.optimizers import build_optimizers
from trainer.options import TrainerOptions
from trainer.strategies.fsdp import FSDP
from trainer.strategies.strategy import Strategy
from trainer.tasks.classification import Classification
from trainer.trainer import Trainer

STOP, UPDATES = 4, 6
LAST = "checkpoints/last.pt"


def make_trainer(strategy, stop=None, accumulation=2):
    torch.manual_seed(0)
    model = strategy.prepare(blocks().double())
    return Trainer(
        model,
        Classification(3),
        torch.optim.AdamW(model.parameters(), lr=0.05),
        *loaders(strategy.group, accumulation),
        strategy=strategy,
        precision="fp64",
        callbacks={"ema": EMA(decay=0.8), "stop": StopAt(stop)},
        options=TrainerOptions(
            max_epochs=None,
            max_steps=UPDATES,
            log_every_n_steps=1,
            clip_grad_norm=0.1,
        ),
    )


def save(strategy, folder):
    """Train a part, and save it as a run does."""
    trainer = make_trainer(strategy, STOP)
    trainer.run_dir = folder
    trainer.fit()
    checkpoint = Checkpoint(monitor=None)
    checkpoint.setup(trainer)
    checkpoint.save_now(trainer)
    strategy.group.gather(None)  # until it is there for all


def train(strategy, saved=None):
    """Train to the end, from what was saved, and return the metrics and a whole checkpoint."""
    trainer = make_trainer(strategy)
    if saved is not None:
        snapshot.restore(trainer, read_checkpoint(saved))
    trainer.fit()
    return trainer.metrics, through_a_file(trainer.strategy.gather_tensors(snapshot.take(trainer)))


in_group = partial(toys.in_group, kind=FSDP)


def tensors(tree):
    return {path: leaf for path, leaf in leaves(tree) if isinstance(leaf, torch.Tensor)}


def assert_same(content, other, tolerance):
    for key in ("model", "optimizer", "ema"):
        one, two = tensors(content[key]), tensors(other[key])
        assert one.keys() == two.keys()
        assert one
        for name, value in one.items():
            torch.testing.assert_close(two[name], value, rtol=0, atol=tolerance, msg=name)


@pytest.fixture(scope="module")
def alone():
    return train(Strategy("cpu"))


OPTIONS = [
    pytest.param(2, {}, id="whole"),
    pytest.param(3, {"wrap_modules": ["Block"]}, id="blocks"),
    pytest.param(2, {"wrap_modules": ["Block"], "reshard_after_forward": False}, id="no_reshard"),
]


@pytest.mark.parametrize(("world_size", "options"), OPTIONS)
def test_shards_change_nothing(alone, ranks, world_size, options):
    for metrics, content in ranks(world_size, in_group(train, **options)):
        assert metrics == pytest.approx(alone[0], rel=0, abs=1e-10)
        assert_same(alone[1], content, 1e-10)


SHARDED = pytest.mark.parametrize("sharded", [False, True], ids=["whole", "shards"])


@SHARDED
def test_a_resume_is_exact(ranks, tmp_path, sharded):
    def interrupted(strategy):
        save(strategy, tmp_path)
        return train(strategy), train(strategy, tmp_path / LAST)

    options = {"sharded_checkpoint": sharded, "wrap_modules": ["Block"]}
    for whole, resumed in ranks(3, in_group(interrupted, **options)):
        assert whole[1]["model"]["2.weight"].device.type == "cpu"
        assert_same(whole[1], resumed[1], 0)
        assert whole[0] == resumed[0]


@SHARDED
def test_any_number_of_processes_goes_on(alone, ranks, tmp_path, sharded):
    ranks(2, in_group(lambda strategy: save(strategy, tmp_path), sharded_checkpoint=sharded))
    (tmp_path / "plain").mkdir()
    save(Strategy("cpu"), tmp_path / "plain")
    for saved, options in ((LAST, {"sharded_checkpoint": True}), (LAST, {}), (f"plain/{LAST}", {})):
        for _, resumed in ranks(3, in_group(partial(train, saved=tmp_path / saved), **options)):
            assert_same(alone[1], resumed, 1e-10)
    assert_same(alone[1], train(Strategy("cpu"), tmp_path / LAST)[1], 1e-10)


def test_shards_are_converted(alone, ranks, tmp_path):
    ranks(2, in_group(lambda strategy: save(strategy, tmp_path), sharded_checkpoint=True))
    whole = tmp_path / "whole.pt"
    convert([str(tmp_path / LAST), str(whole)])
    with pytest.raises(CheckpointError, match="exists"):
        convert([str(whole), str(tmp_path / LAST)])
    assert_same(alone[1], train(Strategy("cpu"), whole)[1], 1e-10)


def test_no_process_holds_what_is_another_ones(ranks, tmp_path):
    def read(strategy):
        save(strategy, tmp_path)
        trainer = make_trainer(strategy)
        payload = read_checkpoint(tmp_path / LAST)
        assert {t.device.type for t in tensors(payload["model"]).values()} == {"meta"}
        payload = checkpoint_shards.read(payload, dict(trainer.model.named_parameters()))
        state = tensors({key: payload[key] for key in ("model", "optimizer", "ema")})
        return [t.to_local().numel() for t in state.values() if t.ndim]

    counts = ranks(3, in_group(read, sharded_checkpoint=True))
    whole = 4 * sum(p.numel() for p in make_trainer(Strategy("cpu")).model.parameters())
    assert sum(map(sum, counts)) == whole  # weights, two moments, an average
    assert max(map(sum, counts)) < whole / 2


OPTIMIZERS = toys.optimizer_nodes()
OPTIMIZERS["gan"] = toys.section("optimizer", "experiment=gan", "optimizer=gan")
STEPS = 3


def network(name=""):
    torch.manual_seed(0)
    width, classes = (8, 4) if name == "lbfgs" else (5, 3)  # 5 and 3 rows make uneven shards
    first, last = nn.Linear(6, width), nn.Linear(width, classes)
    parts = [("generator", first), ("act", nn.Tanh()), ("discriminator", last)]
    return nn.Sequential(OrderedDict(parts)).double()


def stepped(model, node, prefer_fused=False):
    """Step on all samples at once; return the weights, whole."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(8, 6, generator=generator, dtype=torch.float64)
    y = torch.randint(3, (8,), generator=generator)
    optimizers = build_optimizers(model, node, prefer_fused=prefer_fused)

    def evaluate():
        optimizers.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        return loss

    for _ in range(STEPS):
        for optimizer in optimizers.optimizers.values():
            optimizer.step(evaluate)
    fused = {n: o.defaults.get("fused") for n, o in optimizers.items()}
    whole = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in model.parameters()]
    return [p.detach().clone() for p in whole], fused


def test_shards_are_trained_as_the_whole(ranks):
    names = [*OPTIMIZERS.keys() - {"adafactor"}]  # which is refused

    def run(strategy):
        return {n: stepped(strategy.prepare(network(n)), OPTIMIZERS[n], True) for n in names}

    for results in ranks(2, in_group(run)):
        for name, (weights, fused) in results.items():
            # Muon makes its step orthogonal in bfloat16.
            tolerance = 1e-3 if name == "muon" else 1e-10
            whole = stepped(network(name), OPTIMIZERS[name])[0]
            torch.testing.assert_close(weights, whole, rtol=0, atol=tolerance)
            expected = True if name in ("adam", "adamw", "muon", "gan") else None
            assert fused.get("adamw" if name == "muon" else "optimizer", True) is expected
