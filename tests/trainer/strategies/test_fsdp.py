"""Shards train as the whole does with every optimizer, and are saved and resumed as the whole."""

import io
from collections import OrderedDict
from functools import partial
from pathlib import Path

import pytest
import torch
import yaml
from torch import nn

import toys
from callbacks.checkpoint import Checkpoint
from callbacks.ema import EMA
from scripts.convert import convert
from toys import StopAt, blocks, loaders
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


def train(strategy, stop=None, content=None):
    """Train, and return the metrics and a checkpoint."""
    trainer = make_trainer(strategy, stop)
    if content is not None:
        snapshot.restore(trainer, torch.load(io.BytesIO(content), weights_only=True))
    return finished(trainer)


def finished(trainer):
    trainer.fit()
    file = io.BytesIO()
    torch.save(trainer.strategy.gather_tensors(snapshot.take(trainer)), file)
    return trainer.metrics, file.getvalue()


in_group = partial(toys.in_group, kind=FSDP)


def tensors(tree, prefix=""):
    """Flatten the tensors of a checkpoint."""
    if isinstance(tree, torch.Tensor):
        return {prefix: tree}
    children = tree.items() if isinstance(tree, dict) else ()
    return {k: v for name, child in children for k, v in tensors(child, f"{prefix}/{name}").items()}


def assert_same(content, other, tolerance):
    for key in ("model", "optimizer", "ema"):
        one, two = (
            tensors(torch.load(io.BytesIO(c), weights_only=True)[key]) for c in (content, other)
        )
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


def test_a_resume_is_exact_and_plain_and_sharded_runs_go_on_with_one_anothers(alone, ranks):
    def interrupted(strategy):
        whole = train(strategy)
        _, content = train(strategy, STOP)
        return whole, train(strategy, content=content), content

    results = ranks(2, in_group(interrupted, wrap_modules=["Block"]))
    for whole, resumed, _ in results:
        assert_same(whole[1], resumed[1], 0)
        assert whole[0] == resumed[0]
    assert_same(alone[1], train(Strategy("cpu"), content=results[0][2])[1], 1e-10)
    _, plain = train(Strategy("cpu"), STOP)
    for _, resumed in ranks(3, in_group(lambda strategy: train(strategy, content=plain))):
        assert_same(alone[1], resumed, 1e-10)


def save_shards(strategy, folder):
    """Train a part, and save it as a run does; return what a run without a break comes to."""
    whole = train(strategy)
    trainer = make_trainer(strategy, STOP)
    trainer.run_dir = folder
    trainer.fit()
    checkpoint = Checkpoint(monitor=None)
    checkpoint.setup(trainer)
    checkpoint.save_now(trainer)
    return whole


def go_on(strategy, folder):
    """Finish what `save_shards` began, and return the metrics and the last state, whole."""
    trainer = make_trainer(strategy)
    snapshot.restore(trainer, read_checkpoint(folder / "checkpoints" / "last.pt"))
    return finished(trainer)


def test_a_resume_from_shards_is_exact(ranks, tmp_path):
    def interrupted(strategy):
        return save_shards(strategy, tmp_path), go_on(strategy, tmp_path)

    options = {"sharded_checkpoint": True, "wrap_modules": ["Block"]}
    for whole, resumed in ranks(3, in_group(interrupted, **options)):
        whole_state = torch.load(io.BytesIO(whole[1]), weights_only=True)
        assert whole_state["model"]["2.weight"].device.type == "cpu"
        assert_same(whole[1], resumed[1], 0)
        assert whole[0] == resumed[0]


def test_shards_are_read_by_any_number_of_processes(alone, ranks, tmp_path):
    ranks(2, in_group(lambda strategy: save_shards(strategy, tmp_path), sharded_checkpoint=True))
    for options in ({"sharded_checkpoint": True}, {}):
        for _, resumed in ranks(3, in_group(lambda s: go_on(s, tmp_path), **options)):
            assert_same(alone[1], resumed, 1e-10)
    assert_same(alone[1], go_on(Strategy("cpu"), tmp_path)[1], 1e-10)
    sharded, target = str(tmp_path / "checkpoints" / "last.pt"), str(tmp_path / "whole.pt")
    convert([sharded, target])
    with pytest.raises(CheckpointError, match="exists"):
        convert([target, sharded])
    whole = (tmp_path / "whole.pt").read_bytes()
    assert_same(alone[1], train(Strategy("cpu"), content=whole)[1], 1e-10)


def test_no_process_holds_what_is_another_ones(ranks, tmp_path):
    def read(strategy):
        save_shards(strategy, tmp_path)
        trainer = make_trainer(strategy)
        payload = read_checkpoint(tmp_path / "checkpoints" / "last.pt")
        assert {t.device.type for t in tensors(payload["model"]).values()} == {"meta"}
        payload = checkpoint_shards.read(payload, dict(trainer.model.named_parameters()))
        state = tensors({key: payload[key] for key in ("model", "optimizer", "ema")})
        return [t.to_local().numel() for t in state.values() if t.ndim]

    counts = ranks(3, in_group(read, sharded_checkpoint=True))
    whole = 4 * sum(p.numel() for p in make_trainer(Strategy("cpu")).model.parameters())
    assert sum(map(sum, counts)) == whole  # weights, two moments, an average
    assert max(map(sum, counts)) < whole / 2


CONF = Path(__file__).parents[3] / "conf" / "optimizer"
SHIPPED = {path.stem: yaml.safe_load(path.read_text()) for path in sorted(CONF.glob("*.yaml"))}
REFUSED = ("adafactor",)
OPTIMIZERS = {
    name: {key: value for key, value in node.items() if key != "defaults"}
    for name, node in SHIPPED.items()
}
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
    names = [name for name in OPTIMIZERS if name not in REFUSED]
    assert "sgd" in names

    def run(strategy):
        return {n: stepped(strategy.prepare(network(n)), OPTIMIZERS[n], True) for n in names}

    for results in ranks(2, in_group(run)):
        for name, (weights, fused) in results.items():
            # Muon makes its step orthogonal in bfloat16.
            tolerance = 1e-3 if name == "muon" else 1e-10
            for value, other in zip(
                weights, stepped(network(name), OPTIMIZERS[name])[0], strict=True
            ):
                torch.testing.assert_close(value, other, rtol=0, atol=tolerance)
            assert fused.get("adamw" if name == "muon" else "optimizer", True) is (
                True if name in ("adam", "adamw", "muon", "gan") else None
            )


def test_what_torch_does_not_shard_it_refuses(ranks):
    def run(strategy):
        for node in (OPTIMIZERS["lbfgs"], {**OPTIMIZERS["sgd"], "fused": True}):
            with pytest.raises((RuntimeError, ValueError, NotImplementedError)):
                stepped(strategy.prepare(network()), node)

    ranks(2, in_group(run))
