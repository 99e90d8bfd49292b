"""How often the host waits for an accelerator between two log points (I6), and in which order."""

import copy
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import toys
from accelerator import DEVICE, needs_accelerator, needs_simulation, waits
from benchmarks.gpu import Rig, bare, ours
from regimen.callbacks.checkpoint import Checkpoint
from regimen.callbacks.ema import EMA
from regimen.conf.check import parse
from regimen.data.loading import loader
from regimen.scripts.composition.compose import compose
from regimen.trainer.assembly.experiment import build
from regimen.trainer.callback import Callback
from regimen.trainer.checkpoints.reader import read_checkpoint
from regimen.trainer.checkpoints.staging import PinnedMemory, Staging
from regimen.trainer.device import current_stream
from regimen.trainer.optimizers.optimizers import build_optimizers
from regimen.trainer.options import TrainerOptions
from regimen.trainer.strategies.strategy import Strategy
from regimen.trainer.tasks.classification import Classification
from regimen.trainer.trainer import Trainer
from toys import ON_DEVICE

pytestmark = needs_accelerator
SHORT = [
    "trainer.max_steps=7",
    "loader.batch_size=8",
    "trainer.log_every_n_steps=1000",
    "trainer.limit_val_batches=0",
    "trainer.limit_test_batches=0",
    "loader.num_workers=0",
    "callbacks=none",
]
DIGITS = ["experiment=resnet18", "model=small_cnn", "model.widths=[4,8]"]
NODES = toys.optimizer_nodes() | {
    "muon_normalized": compose(
        ["optimizer=muon", "+optimizer.optimizers.muon.normalized=true"]
    ).config["optimizer"]
}
NODES.pop("lbfgs")  # which searches
# What starts no kernel.
FREE = {
    "view",
    "detach",
    "narrow",
    "alias",
    "reshape",
    "device",
    "_local_scalar_dense",
    "t",
    "transpose",
    "permute",
    "expand",
    "select",
    "slice",
    "split",
    "unbind",
    "unsqueeze",
    "squeeze",
    "as_strided",
    "lift_fresh",
    "_unsafe_view",
    "empty",
    "empty_like",
    "empty_strided",
    "_record_function_enter_new",
    "_record_function_exit",
}


class Watch(Callback):
    """Count the waits of five updates, their data included."""

    def __init__(self):
        self.counting = waits()
        self.found = None

    def on_update_end(self, trainer):
        if trainer.state.updates == 2:  # all state is there
            self.found = self.counting.__enter__()
        elif trainer.state.updates == 7:
            self.counting.__exit__(None, None, None)


def built(words, callback):
    strategy = Strategy(DEVICE)
    strategy.setup()
    config = parse(compose([*words[:1], *SHORT, *words[1:]]).config)
    return build(config, strategy, {"callback": callback}).trainer


@pytest.mark.parametrize(
    ("words", "each"),
    [
        pytest.param(DIGITS, 0, id="resnet18"),
        pytest.param(["experiment=resnet18_cifar10", "data=digits", *DIGITS[1:]], 0, id="cifar10"),
        pytest.param(["experiment=images", *DIGITS[1:], "data.image_size=32"], 0, id="images"),
        pytest.param(["experiment=multilabel", "model.widths=[4,8]"], 0, id="multilabel"),
        pytest.param(["experiment=regression"], 0, id="regression"),
        pytest.param(["experiment=segmentation", "model.width=4"], 0, id="segmentation"),
        pytest.param(["experiment=char_lm", "model.dim=16", "model.depth=1"], 0, id="char_lm"),
        pytest.param(["experiment=gan", "model.width=4"], 0, id="gan"),
        pytest.param(
            ["experiment=gan", "model.width=4", "trainer.on_nonfinite=skip"], 2, id="turns, skip"
        ),
        pytest.param(
            [
                *DIGITS,
                "transforms=mixup",
                "loader.num_workers=2",
                "callbacks=[ema]",
                "trainer.gradient_accumulation_steps=2",
                "trainer.clip_grad_norm=1",
                "trainer.gradient_noise={eta: 0.01, gamma: 0.55}",
            ],
            0,
            id="workers, mixup, accumulation, clipping, noise, EMA",
        ),
        pytest.param(
            [
                *DIGITS,
                "transforms=on_device",
                "data.cache=device",
                "trainer=fast",
                "trainer.activation_checkpointing=[features.*]",
            ],
            0,
            id="data on the device, bf16, recomputed",
        ),
        pytest.param([*DIGITS, "task/loss=input_gradient_penalty"], 0, id="penalty"),
        pytest.param([*DIGITS, "task/metrics=per_class"], 0, id="metrics"),
        pytest.param(
            [
                *DIGITS,
                "callbacks=[default,unfreeze,swa,training_samples]",
                "callbacks.unfreeze.stages={layer4: null, body: null}",
                "callbacks.unfreeze.stages.own={pattern: 'features.*', step: 4}",
            ],
            0,
            id="callbacks",
        ),
        # GradScaler asks for each optimizer whether it may step.
        pytest.param([*DIGITS, "trainer.precision=fp16"], 1, id="fp16"),
    ],
)
def test_nothing_waits_between_two_log_points(words, each, digit_photographs):
    if words[0] == "experiment=images":
        words = [*words, f"data.root={digit_photographs}"]
    watch = Watch()
    trainer = built(words, watch)

    trainer.fit()

    assert trainer.state.updates == 7
    assert sum(watch.found.values()) == 5 * each, watch.found


def network(layers=3):
    inner = [
        part
        for _ in range(layers)
        for part in (nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU())
    ]
    ends = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3)]
    return nn.Sequential(nn.Conv2d(1, 4, 3), *inner, *ends)


def trainer_of(name, callbacks, layers=3, **options):
    batch = torch.randn(4, 1, 8, 8), torch.tensor([0, 1, 2, 0])
    model = network(layers)
    strategy = Strategy(DEVICE)
    model = strategy.prepare(model)
    node = copy.deepcopy(NODES[name])
    optimizers = build_optimizers(model, node, prefer_fused=True, batch_size=8)
    options = {"clip_grad_norm": 1.0, "log_every_n_steps": 1000, "max_steps": 7, **options}
    return Trainer(
        model,
        Classification(3),
        optimizers,
        [tuple(part.to(DEVICE) for part in batch)] * 7,
        strategy=strategy,
        callbacks=callbacks,
        options=TrainerOptions(**options),
    )


@pytest.mark.parametrize("name", list(NODES))
@pytest.mark.parametrize("choice", ["stop", "skip"])
def test_an_update_waits_once_or_not_at_all(name, choice):
    watch = Watch()
    trainer = trainer_of(name, {"watch": watch, "ema": EMA(0.9)}, on_nonfinite=choice)
    trainer.fit()
    by_device = choice == "stop" and name in {*ON_DEVICE, "muon_normalized"}
    each = 0 if by_device else 1
    if name == "adafactor":  # torch's own step asks for two norms of each parameter
        each += 2 * len(list(trainer.model.parameters()))
    assert sum(watch.found.values()) == 5 * each, watch.found
    assert trainer.updater.guard.is_deferred == by_device


class Calls(TorchDispatchMode):
    """Count operators that start a kernel."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func.__name__.split(".")[0] not in FREE
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("choice", "most"), [("stop", 7), ("skip", 2)])
def test_the_guard_and_the_sums_do_not_grow_with_the_model(choice, most):
    """What an update calls beside forward, backward and step: the same for any number of layers."""
    counts = []
    for layers in (3, 9):
        trainer = trainer_of("sgd", {}, layers, on_nonfinite=choice)
        trainer.fit()
        norm = torch.ones((), device=DEVICE)
        with Calls() as calls:
            trainer.updater.guard.begin_update()
            trainer.updater.guard.is_nonfinite(norm)
        counts.append(calls.count)
    assert counts[0] == counts[1] <= most


@pytest.mark.parametrize(
    ("new_labels", "most"),
    [
        pytest.param(False, 11, id="a batch that stays"),
        pytest.param(True, 13, id="labels that the host has never seen"),
    ],
)
def test_an_update_calls_few_operators_beyond_by_hand(new_labels, most):
    """What they are for: the guard and BatchNorm's statistics (8), an update without labels."""
    rig = Rig(DEVICE, None, 6, small=True, mode=None)
    images = torch.randn(2, 3, 32, 32, device=DEVICE).to(memory_format=torch.channels_last)
    labels = torch.tensor([3, 4]).to(DEVICE)

    def batches(updates):
        return [(images, labels.clone() if new_labels else labels) for _ in range(updates)]

    counts = {}
    for make in (bare, ours):
        run = make(rig, "resnet18", batches)
        found = []
        run(2)
        for updates in (2, 6):  # what a run does once cancels out
            with Calls() as calls:
                run(updates)
            found.append(calls.count)
        counts[make] = (found[1] - found[0]) / 4
    assert counts[ours] - counts[bare] <= most


def test_statistics_of_an_average_are_measured_without_waiting():
    """However many batches: the end of an epoch waits as often."""
    counts = []
    for batches in (1, 4):
        swa = ["callbacks=[swa]", "callbacks.swa.start_epoch=0", "trainer.max_epochs=1"]
        more = [f"callbacks.swa.bn_batches={batches}", "trainer.limit_train_batches=4"]
        trainer = built([*DIGITS, *swa, *more], Callback())
        with waits() as found:
            trainer.fit()
        counts.append(sum(found.values()))
    assert counts[0] == counts[1]


# What tells of a missing wait: each of these passes on a CPU.


@needs_simulation
@pytest.mark.parametrize(
    ("name", "stand_in", "said"),
    [
        pytest.param(
            "current_stream",
            lambda device: SimpleNamespace(wait_event=id, wait_stream=id),
            "reads what is written by",
            id="no wait_event",
        ),
        pytest.param(
            "record_stream", lambda stream, tensor: tensor, "gets memory of", id="no record"
        ),
    ],
)
def test_a_race_of_the_loader_would_be_noticed(name, stand_in, said, monkeypatch):
    monkeypatch.setattr(loader, name, stand_in)
    if name == "current_stream":
        used = loader.record_stream
        monkeypatch.setattr(loader, "record_stream", lambda _, t: used(current_stream(DEVICE), t))
    with pytest.raises(Exception, match=f"race: .* {said}"):
        built(DIGITS, Callback()).fit()


def test_a_save_pins_few_slabs_and_its_tensors_have_storages_of_their_own(tmp_path):
    shapes = [(3, 5), (), (0, 4), (300_000,), (7, 3, 9, 9), (2_000_000,), (64,)]
    tree = [torch.randn(shape, device=DEVICE) for shape in shapes]
    tree[4] = tree[4].to(memory_format=torch.channels_last)
    tree += [torch.arange(3, device=DEVICE), torch.ones(5, dtype=torch.bfloat16, device=DEVICE)]
    tree.append(torch.randn(6, 8, device=DEVICE)[:, ::2])  # not dense
    staging = Staging()
    places = []
    for _ in range(2):
        copies = staging.copy(tree)
        staging.wait()
        for copy_, tensor in zip(copies, tree, strict=True):
            assert torch.equal(copy_, tensor.cpu())
            assert copy_.stride() == torch.empty_like(tensor).stride()
            assert copy_.untyped_storage().nbytes() == copy_.nbytes
        places.append([copy_.data_ptr() for copy_ in copies])
    assert places[0] == places[1]
    assert staging._pinned.nbytes <= 2 * sum(tensor.nbytes for tensor in tree)
    by_hand = [tensor.cpu() for tensor in tree]
    for name, content in (("ours", copies), ("by hand", by_hand)):
        torch.save(content, tmp_path / name)
    sizes = [(tmp_path / name).stat().st_size for name in ("ours", "by hand")]
    assert abs(sizes[0] - sizes[1]) < 1000


def test_pinned_memory_of_many_small_tensors_is_not_rounded_up_one_by_one():
    memory = PinnedMemory()
    tensors = [torch.empty(2**16 + 100, dtype=torch.uint8) for _ in range(200)]  # each by itself: 2
    for tensor in tensors:
        memory.empty_like(tensor)
    assert memory.nbytes < 1.5 * sum(tensor.nbytes for tensor in tensors)


@pytest.mark.parametrize("waited", [True, pytest.param(False, marks=needs_simulation)])
def test_a_checkpoint_is_written_when_its_copy_has_arrived(waited, tmp_path, monkeypatch):
    if not waited:
        monkeypatch.setattr(Staging, "wait", lambda self: None)
    trainer = trainer_of("sgd", {"checkpoint": Checkpoint()})
    trainer.use_run_dir(tmp_path)
    trainer.fit()
    saved = read_checkpoint(tmp_path / "checkpoints" / "last.pt")["model"]
    same = [torch.equal(saved[n], t.cpu()) for n, t in trainer.model.state_dict().items()]
    assert all(same) == waited
