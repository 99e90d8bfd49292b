"""Meshes of several dimensions train as one process does, and go on from one another."""

import io
from functools import partial

import pytest
import torch
from torch import nn

import toys
from callbacks.checkpoint import Checkpoint
from callbacks.ema import EMA
from conf.check import parse
from conf.errors import ConfigError
from conf.schema_trainer import TensorParallelConfig
from scripts.composition.compose import compose
from toys import StopAt, blocks, loaders
from trainer import snapshot
from trainer.assembly.experiment import build, eval_loader
from trainer.checkpoints.reader import read_checkpoint
from trainer.options import TrainerOptions
from trainer.strategies.ddp import Processes
from trainer.strategies.fsdp import FSDP
from trainer.strategies.strategy import Mesh, Strategy, tensor_styles
from trainer.tasks.classification import Classification
from trainer.trainer import Trainer

STOP, UPDATES = 4, 6


class Seen:
    """The number of samples that an evaluation counts."""

    def reset(self):
        self.samples = torch.zeros(())

    def update(self, output, target):
        self.samples += len(target)

    def merge(self, reduce):
        self.samples = reduce(self.samples)

    def compute(self):
        return self.samples


def make_trainer(strategy, stop=None, network=blocks):
    torch.manual_seed(0)
    model = strategy.prepare(network().double())
    return Trainer(
        model,
        Classification(3, metrics={"seen": Seen()}),
        torch.optim.AdamW(model.parameters(), lr=0.05),
        *loaders(strategy.group),
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


def train(strategy, stop=None, content=None, network=blocks):
    """Train, and return the metrics and a checkpoint."""
    trainer = make_trainer(strategy, stop, network)
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


def save_shards(strategy, folder, network=blocks):
    """Train a part, and save it as a run does; return what a run without a break comes to."""
    whole = train(strategy, network=network)
    save(strategy, folder, network)
    return whole


def save(strategy, folder, network):
    trainer = make_trainer(strategy, STOP, network)
    trainer.run_dir = folder
    trainer.fit()
    checkpoint = Checkpoint(monitor=None)
    checkpoint.setup(trainer)
    checkpoint.save_now(trainer)


def go_on(strategy, folder, network=blocks):
    """Finish what `save_shards` began, and return the metrics and the last state, whole."""
    trainer = make_trainer(strategy, network=network)
    snapshot.restore(trainer, read_checkpoint(folder / "checkpoints" / "last.pt"))
    return finished(trainer)


class Pair(nn.Module):
    """Two layers of which the second takes what the first is split into, unevenly as shards."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(9, 10), nn.Linear(10, 9)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(x)))


def pairs():
    return nn.Sequential(Pair(), Pair(), nn.Linear(9, 3))


SPLIT = TensorParallelConfig(size=2, plan={"*.up": "colwise", "*.down": "rowwise"})


WHOLE = TensorParallelConfig(size=2, plan={"*.up": "colwise_rep", "*.down": "rowwise_rep"})


MESHES = {
    "shards": {"wrap_modules": ["Pair"]},
    "replicas": {"wrap_modules": ["Pair"], "shard_size": 2},
    "tensor": {"wrap_modules": ["Pair"], "tensor_parallel": SPLIT},
    "replicas_tensor": {"shard_size": 1, "tensor_parallel": WHOLE},
}


@pytest.fixture(scope="module")
def one_process():
    return train(Strategy("cpu"), network=pairs)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("before", "mesh"),
    [
        pytest.param("shards", "replicas", id="replicas"),
        pytest.param("replicas", "tensor", id="tensor"),
        pytest.param("tensor", "replicas_tensor", id="replicas_tensor"),
    ],
)
def test_a_mesh_trains_as_one_process_and_goes_on_from_another(
    one_process, ranks, tmp_path, before, mesh
):
    """Four processes, gradients accumulated and clipped, a short last batch, an average."""
    saved, own = tmp_path / "saved", tmp_path / "own"
    saved.mkdir()
    own.mkdir()

    def then(strategy):
        whole, content = save_shards(strategy, own, pairs), train(strategy, 4, network=pairs)[1]
        again = go_on(strategy, own, pairs), train(strategy, content=content, network=pairs)
        return whole, content, again, go_on(strategy, saved, pairs)

    sharded = partial(in_group, sharded_checkpoint=True)
    ranks(4, sharded(lambda strategy: save(strategy, saved, pairs), **MESHES[before]), 300)
    results = ranks(4, sharded(then, **MESHES[mesh]), 300)
    for whole, _, again, resumed in results:
        assert one_process[0]["val/seen"] == 10
        for metrics, state in (whole, resumed):
            assert metrics == pytest.approx(one_process[0], rel=0, abs=1e-10)
            assert_same(one_process[1], state, 1e-10)
        for metrics, state in again:
            assert metrics == whole[0]
            assert_same(whole[1], state, 0)
    for result in (
        train(Strategy("cpu"), content=results[0][1], network=pairs),
        go_on(Strategy("cpu"), own, pairs),
    ):
        assert result[0] == pytest.approx(one_process[0], rel=0, abs=1e-10)
        assert_same(one_process[1], result[1], 1e-10)


def test_processes_of_a_tensor_group_have_the_same_samples_and_seeds(ranks):
    plan = "strategy.tensor_parallel={size: 2, plan: {layers.*: colwise_rep}}"
    typed = ["experiment=resnet18", "model=mlp", "strategy=fsdp", "strategy.devices=4", plan]
    config = parse(compose(typed).config)

    def facts(rank):
        options = config.strategy.tensor_parallel
        strategy = FSDP(Processes("gloo", 60, "cpu"), tensor_parallel=options)
        strategy.setup()
        made = build(config, strategy)
        validation = eval_loader(config, made.data.sets["val"], strategy)
        samplers = made.trainer.train_loader.sampler, validation.sampler
        strategy.group.leave()
        return torch.initial_seed(), *(sampler.pieces(0, 0) for sampler in samplers)

    one, same, other, last = ranks(4, facts)
    assert one == same != other == last
    for split in (1, 2):
        indices = [i for piece in (*one[split], *other[split]) for i in piece.indices]
        assert len(indices) == len(set(indices)) == one[split][0].total


def test_a_mesh_is_told_in_words():
    assert str(Mesh.of(8, 2, 2)) == "8 processes = 2 replicas x 2 shards x 2 tensor"
    assert str(Mesh.of(8, 2)) == "8 processes = 4 replicas x 2 shards"
    assert str(Mesh.of(8)) == "8 processes = 8 shards"


class Planned(nn.Module):
    """A model with a plan of its own, as those of transformers have."""

    def __init__(self, **more):
        super().__init__()
        self.layers, self.embed, self.head = pairs(), nn.Embedding(8, 4), nn.Linear(4, 8)
        self.tp_plan = {"layers.*.up": "colwise", "embed": "embedding_rowwise", **more}


def test_a_models_own_plan():
    inner = Planned(**{"head": "colwise_gather_output", "experts.*": "grouped_gemm"})
    found = tensor_styles(nn.Sequential(inner), "auto", 2)
    ups = {f"0.layers.{n}.up": "colwise" for n in (0, 1)}
    assert found == ups | {"0.embed": "rowwise", "0.head": "colwise_rep"}
    with pytest.raises(ConfigError, match="no style 'grouped_gemm'"):
        tensor_styles(Planned(**{"layers.2": "grouped_gemm"}), "auto", 2)
    inner.head.weight = inner.embed.weight
    with pytest.raises(ConfigError, match=r"0\.embed, 0\.head: its weight is another module's"):
        tensor_styles(nn.Sequential(inner), "auto", 2)
