"""Shards and meshes train as one process does, with every optimizer, and go on from one another."""

from collections import OrderedDict
from functools import partial

import pytest
import torch
import torch.distributed.fsdp  # or every process would import it, and sympy with it
from torch import nn

import toys
from regimen.callbacks.checkpoint import Checkpoint
from regimen.callbacks.ema import EMA
from regimen.conf.check import parse
from regimen.conf.errors import ConfigError
from regimen.scripts.composition.compose import compose
from regimen.scripts.convert import convert
from regimen.trainer.assembly.experiment import build
from regimen.trainer.assembly.loaders import eval_loader
from regimen.trainer.checkpoints import shards as checkpoint_shards
from regimen.trainer.checkpoints.reader import read_checkpoint
from regimen.trainer.errors import CheckpointError, ModelError
from regimen.trainer.optimizers.optimizers import build_optimizers
from regimen.trainer.strategies.fsdp import FSDP
from regimen.trainer.strategies.strategy import Mesh, Strategy
from regimen.trainer.strategies.tensor_parallel import tensor_styles
from regimen.trainer.tasks.classification import Classification
from toys import StopAt, leaves, loaders, through_a_file, trainer_of

STOP = 4
UPDATES = 6
LAST = "checkpoints/last.pt"


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


class Pair(nn.Module):
    """Two layers of which the second takes what the first is split into, unevenly as shards."""

    def __init__(self):
        super().__init__()
        self.up = nn.Linear(9, 10)
        self.down = nn.Linear(10, 9)

    def forward(self, x):
        hidden = torch.tanh(self.up(x))
        return x + self.down(hidden)


def pairs():
    return nn.Sequential(Pair(), Pair(), nn.Linear(9, 3))


def make_trainer(strategy, stop=None, network=pairs):
    """Gradients are accumulated and clipped, the last batch is short, weights are averaged."""
    torch.manual_seed(0)
    train, val = loaders(strategy.group)
    return trainer_of(
        Classification(3, metrics={"seen": Seen()}),
        train,
        model=network().double(),
        make=partial(torch.optim.AdamW, lr=0.05),
        val=val,
        strategy=strategy,
        callbacks={"ema": EMA(decay=0.8), "stop": StopAt(stop)},
        max_epochs=None,
        max_steps=UPDATES,
        log_every_n_steps=1,
        clip_grad_norm=0.1,
    )


def save(strategy, folder):
    """Train a part, and save it as a run does."""
    folder.mkdir(exist_ok=True)
    trainer = make_trainer(strategy, STOP)
    trainer.use_run_dir(folder)
    trainer.fit()
    checkpoint = Checkpoint(monitor=None)
    checkpoint.setup(trainer)
    checkpoint.save_now(trainer)
    strategy.group.gather(None)  # until it is there for all


def train(strategy, saved=None, stop=None):
    """Train on from what was saved, and return the metrics and a whole checkpoint."""
    trainer = make_trainer(strategy, stop)
    if isinstance(saved, dict):
        trainer.load_state_dict(saved)
    elif saved is not None:
        trainer.load_state_dict(read_checkpoint(saved))
    trainer.fit()
    content = strategy.gather_tensors(trainer.state_dict())
    content = strategy.group.broadcast(content)  # what is whole is so on the main process
    return trainer.metrics, through_a_file(content)


in_group = partial(toys.in_group, kind=FSDP)


def tensors(tree):
    return {path: leaf for path, leaf in leaves(tree) if isinstance(leaf, torch.Tensor)}


def taken(strategy):
    """Return how many bytes of tensors this process holds of what a save takes."""
    trainer = make_trainer(strategy, STOP)
    trainer.fit()
    content = trainer.state_dict()
    weights = tensors(content["model"]).values()
    return sum(weight.nbytes for weight in weights if weight.device.type != "meta")


def test_the_whole_state_is_in_the_memory_of_one_process(ranks):
    main, *others = ranks(3, in_group(taken))
    assert main > 0
    assert others == [0, 0]


def assert_same(one, other, tolerance=1e-10):
    """Compare the metrics and the checkpoints of two runs."""
    metrics, content = one
    other_metrics, other_content = other
    assert other_metrics == pytest.approx(metrics, rel=0, abs=tolerance)
    for key in ("model", "optimizer", "ema"):
        known = tensors(content[key])
        found = tensors(other_content[key])
        assert known
        assert known.keys() == found.keys()
        for name, value in known.items():
            torch.testing.assert_close(found[name], value, rtol=0, atol=tolerance, msg=name)


@pytest.fixture(scope="module")
def alone():
    metrics, content = train(Strategy("cpu"))
    assert metrics["val/seen"] == 10
    return metrics, content


OPTIONS = [
    pytest.param(2, {}, id="whole"),
    pytest.param(3, {"wrap_modules": ["Pair"]}, id="blocks"),
    pytest.param(2, {"wrap_modules": ["Pair"], "reshard_after_forward": False}, id="no_reshard"),
]


@pytest.mark.parametrize(("world_size", "options"), OPTIONS)
def test_shards_change_nothing(alone, ranks, world_size, options):
    for found in ranks(world_size, in_group(train, **options)):
        assert_same(alone, found)


SHARDED = pytest.mark.parametrize("sharded", [False, True], ids=["whole", "shards"])


@SHARDED
def test_a_resume_is_exact(ranks, tmp_path, sharded):
    def interrupted(strategy):
        save(strategy, tmp_path)
        return train(strategy), train(strategy, tmp_path / LAST)

    options = {"sharded_checkpoint": sharded, "wrap_modules": ["Pair"]}
    for whole, resumed in ranks(3, in_group(interrupted, **options)):
        _, content = whole
        assert content["model"]["2.weight"].device.type == "cpu"
        assert_same(whole, resumed, 0)


@SHARDED
def test_any_number_of_processes_goes_on(alone, ranks, tmp_path, sharded):
    by_two = tmp_path / LAST
    by_one = tmp_path / "plain" / LAST
    ranks(2, in_group(lambda strategy: save(strategy, tmp_path), sharded_checkpoint=sharded))
    save(Strategy("cpu"), tmp_path / "plain")

    def assert_three_go_on(saved, **options):
        for resumed in ranks(3, in_group(partial(train, saved=saved), **options)):
            assert_same(alone, resumed)

    assert_three_go_on(by_two, sharded_checkpoint=True)
    assert_three_go_on(by_two)
    assert_three_go_on(by_one)
    assert_same(alone, train(Strategy("cpu"), by_two))


def test_shards_are_converted(alone, ranks, tmp_path):
    ranks(2, in_group(lambda strategy: save(strategy, tmp_path), sharded_checkpoint=True))
    whole = tmp_path / "whole.pt"
    convert([str(tmp_path / LAST), str(whole)])

    with pytest.raises(CheckpointError, match="exists"):
        convert([str(whole), str(tmp_path / LAST)])
    assert_same(alone, train(Strategy("cpu"), whole))


def test_no_process_holds_what_is_another_ones(ranks, tmp_path):
    def numbers_read(strategy):
        """Return how many numbers this process reads of a checkpoint."""
        save(strategy, tmp_path)
        trainer = make_trainer(strategy)
        payload = read_checkpoint(tmp_path / LAST)
        for weight in tensors(payload["model"]).values():
            assert weight.device.type == "meta"
        payload = checkpoint_shards.read(payload, dict(trainer.model.named_parameters()))
        state = tensors({key: payload[key] for key in ("model", "optimizer", "ema")})
        return sum(value.to_local().numel() for value in state.values() if value.ndim)

    counts = ranks(3, in_group(numbers_read, sharded_checkpoint=True))

    model = make_trainer(Strategy("cpu")).model
    parameters = sum(p.numel() for p in model.parameters())
    whole = 4 * parameters  # weights, two moments, an average

    assert sum(counts) == whole
    assert max(counts) < whole / 2


# Without the rules of single recipes, which name layers of theirs.
OPTIMIZERS = {name: {**node, "param_groups": {}} for name, node in toys.optimizer_nodes().items()}
OPTIMIZERS["gan"] = toys.section("optimizer", "experiment=gan", "optimizer=gan")
STEPS = 3


def network(name=""):
    torch.manual_seed(0)
    width, classes = (8, 4) if name == "lbfgs" else (5, 3)  # 5 and 3 rows make uneven shards
    layers = {
        "generator": nn.Linear(6, width),
        "act": nn.Tanh(),
        "discriminator": nn.Linear(width, classes),
    }
    return nn.Sequential(OrderedDict(layers)).double()


def stepped(model, node, prefer_fused=False):
    """Step on all samples at once; return the weights, whole, and which optimizers are fused."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(8, 6, generator=generator, dtype=torch.float64)
    y = torch.randint(3, (8,), generator=generator)
    optimizers = build_optimizers(model, node, prefer_fused=prefer_fused, batch_size=8)

    def evaluate():
        optimizers.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        return loss

    for _ in range(STEPS):
        for optimizer in optimizers.optimizers.values():
            optimizer.step(evaluate)

    weights = []
    for parameter in model.parameters():
        whole = parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter
        weights.append(whole.detach().clone())
    fused = {name: o.defaults.get("fused") for name, o in optimizers.items()}
    return weights, fused


def assert_fused(name, fused):
    """Check that a kernel is fused where torch has such a one."""
    target = OPTIMIZERS[name].get("_target_")
    is_adam = target in ("torch.optim.Adam", "torch.optim.AdamW")
    has_fused = is_adam or name in ("muon", "gan")
    key = "adamw" if name == "muon" else "optimizer"
    assert fused.get(key, True) is (True if has_fused else None)


def test_shards_are_trained_as_the_whole(ranks):
    names = OPTIMIZERS.keys() - {"adafactor"}  # which is refused

    def run(strategy):
        found = {}
        for name in sorted(names):
            model = strategy.prepare(network(name))
            found[name] = stepped(model, OPTIMIZERS[name], prefer_fused=True)
        return found

    for results in ranks(2, in_group(run)):
        for name, (weights, fused) in results.items():
            # Muon makes its step orthogonal in bfloat16.
            tolerance = 1e-3 if name == "muon" else 1e-10
            whole, _ = stepped(network(name), OPTIMIZERS[name])
            torch.testing.assert_close(weights, whole, rtol=0, atol=tolerance)
            assert_fused(name, fused)


def split(more=""):
    plan = {"*.up": f"colwise{more}", "*.down": f"rowwise{more}"}
    return {"size": 2, "plan": plan}


MESHES = {
    "shards": {"wrap_modules": ["Pair"]},
    "replicas": {"wrap_modules": ["Pair"], "shard_size": 2},
    "tensor": {"wrap_modules": ["Pair"], "tensor_parallel": split()},
    "replicas_tensor": {"shard_size": 1, "tensor_parallel": split("_rep")},
}


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
    alone, ranks, tmp_path, before, mesh
):
    saved = tmp_path / "saved"
    own = tmp_path / "own"

    def then(strategy):
        save(strategy, own)
        whole = train(strategy)
        _, content = train(strategy, stop=STOP)
        from_file = train(strategy, own / LAST)
        from_memory = train(strategy, content)
        from_another = train(strategy, saved / LAST)
        return whole, content, from_file, from_memory, from_another

    sharded = partial(in_group, sharded_checkpoint=True)
    ranks(4, sharded(lambda strategy: save(strategy, saved), **MESHES[before]), 300)
    results = ranks(4, sharded(then, **MESHES[mesh]), 300)

    for whole, _, from_file, from_memory, from_another in results:
        assert_same(alone, whole)
        assert_same(alone, from_another)
        assert_same(whole, from_file, 0)
        assert_same(whole, from_memory, 0)

    _, content, *_ = results[0]
    assert_same(alone, train(Strategy("cpu"), content))
    assert_same(alone, train(Strategy("cpu"), own / LAST))


def indices_of(batch_slices):
    """Return the samples of some batch slices in a row."""
    found = []
    for batch_slice in batch_slices:
        found += batch_slice.indices
    return found


def test_processes_of_a_tensor_group_have_the_same_samples_and_seeds(ranks):
    plan = "strategy.tensor_parallel={size: 2, plan: {layers.*: colwise_rep}}"
    typed = ["experiment=resnet18", "model=mlp", "strategy=fsdp", "strategy.devices=4", plan]
    config = parse(compose(typed).config)
    options = config.strategy["tensor_parallel"]

    def facts(rank):
        """Return the seed, and the batch slices of the first update and validation batch."""
        strategy = FSDP(accelerator="cpu", timeout=60, tensor_parallel=options)
        strategy.setup()
        made = build(config, strategy)
        train = made.trainer.train_loader.sampler
        val = eval_loader(config, made.data.sets["val"], strategy).sampler
        strategy.group.leave()
        return torch.initial_seed(), train.batch_slices(0, 0), val.batch_slices(0, 0)

    one, same, other, last = ranks(4, facts)

    assert one == same
    assert other == last
    assert same != other

    _, train, val = one
    _, other_train, other_val = other
    for mine, others in ((train, other_train), (val, other_val)):
        indices = indices_of(mine) + indices_of(others)
        assert len(set(indices)) == len(indices)
        assert len(indices) == mine[0].total


class Scaled(Pair):
    """A parameter that is whole, between the split layers."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x):
        hidden = torch.tanh(self.up(x))
        return x + self.down(hidden * self.scale)


def test_a_whole_parameter_between_split_layers_is_refused(ranks):
    def scaled():
        return nn.Sequential(Scaled(), nn.Linear(9, 3))

    def refused(strategy):
        trainer = make_trainer(strategy, network=scaled)
        with pytest.raises(ModelError, match=r"0.scale is whole, and used on a part") as caught:
            trainer.fit()
        (problem,) = caught.value.problems
        return problem.key

    found = ranks(2, in_group(refused, tensor_parallel=split()))
    assert found == ["strategy.tensor_parallel.plan"] * 2


def test_sparse_gradients_are_refused_before_an_update(ranks):
    def network(freezes):
        model = nn.Sequential(nn.Embedding(4, 3, sparse=True), nn.Linear(3, 2))
        model[0].requires_grad_(not freezes)
        return model

    def refused(strategy):
        make_trainer(strategy, network=partial(network, freezes=True))  # has no such gradient
        with pytest.raises(ModelError, match=r"sparse one of 0;.* sparse=False") as caught:
            make_trainer(strategy, network=partial(network, freezes=False))
        return caught.value.problems[0].key

    assert ranks(2, in_group(refused)) == ["strategy"] * 2


def test_a_mesh_is_told_in_words():
    three_dimensions = Mesh.of(8, 2, 2)
    replicas = Mesh.of(8, 2)
    shards = Mesh.of(8)

    assert str(three_dimensions) == "8 processes = 2 replicas x 2 shards x 2 tensor"
    assert str(replicas) == "8 processes = 4 replicas x 2 shards"
    assert str(shards) == "8 processes = 8 shards"


class Planned(nn.Module):
    """A model with a plan of its own, as those of transformers have."""

    def __init__(self, **more):
        super().__init__()
        self.layers = pairs()
        self.embed = nn.Embedding(8, 4)
        self.head = nn.Linear(4, 8)
        self.tp_plan = {"layers.*.up": "colwise", "embed": "embedding_rowwise", **more}


def test_a_models_own_plan():
    inner = Planned(**{"head": "colwise_gather_output", "experts.*": "grouped_gemm"})
    model = nn.Sequential(inner)
    assert tensor_styles(model, "auto", 2) == {
        "0.layers.0.up": "colwise",
        "0.layers.1.up": "colwise",
        "0.embed": "rowwise",
        "0.head": "colwise_rep",
    }

    inner.head.weight = inner.embed.weight
    with pytest.raises(ConfigError, match=r"0\.embed, 0\.head: its weight is another module's"):
        tensor_styles(model, "auto", 2)


def test_a_style_of_a_models_own_plan_that_is_unknown_is_refused():
    model = Planned(**{"layers.2": "grouped_gemm"})
    with pytest.raises(ConfigError, match="no style 'grouped_gemm'"):
        tensor_styles(model, "auto", 2)
