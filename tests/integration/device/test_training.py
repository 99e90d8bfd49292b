"""Training on an accelerator is that of the CPU: in float64 to the bit on the simulated one."""

from pathlib import Path

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode

from accelerator import CPU, DEVICE, SIMULATED, check_same, needs_accelerator, waits
from regimen.conf.check import parse
from regimen.data.batch import BatchSlice, to_device
from regimen.data.loading.device_transforms import DeviceTransforms
from regimen.scripts.composition.compose import compose
from regimen.trainer import rng
from regimen.trainer.assembly import parts
from regimen.trainer.assembly.experiment import build
from regimen.trainer.assembly.parts import with_classes
from regimen.trainer.device import device_count
from regimen.trainer.rng import RandomStates
from regimen.trainer.strategies.strategy import Strategy
from regimen.trainer.targets.instantiate import instantiate
from toys import Log, through_a_file

pytestmark = needs_accelerator
TRANSFORMS = Path(__file__).parents[3] / "conf" / "transforms"
SHORT = [
    "trainer.precision=fp64",
    "trainer.max_epochs=2",
    "trainer.limit_train_batches=3",
    "trainer.limit_val_batches=1",
    "trainer.log_every_n_steps=2",
    "callbacks=none",
    "loader.batch_size=8",
    "loader.eval_batch_size=16",
    "loader.num_workers=0",
]
DIGITS = ["experiment=resnet18", "model=small_cnn", "model.widths=[4,8]"]
PENALISED = ["task/loss=input_gradient_penalty", "task/metrics=per_class"]


class Asked(TorchDispatchMode):
    """Note the operators."""

    def __init__(self):
        super().__init__()
        self.names = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.add(func.__name__)
        return func(*args, **(kwargs or {}))


def trained(words, device):
    """Train a configuration for six updates; return its weights and all that it logs."""
    log = Log()
    strategy = Strategy(device)
    strategy.setup()
    config = parse(compose([*words[:1], *SHORT, *words[1:]]).config)
    trainer = build(config, strategy, {"log": log}).trainer
    trainer.fit()
    lines = [{k: v for k, v in line.items() if k[:4] != "time"} for _, line in log.lines]
    averages = {n: c.tensors() for n, c in trainer.callbacks.items() if hasattr(c, "tensors")}
    return {"model": trainer.model.state_dict(), "log": lines, "averages": averages}


@pytest.mark.parametrize(
    ("words", "tolerance"),
    [
        pytest.param(["experiment=regression", "loader.num_workers=2"], 0, id="regression"),
        pytest.param(["experiment=multilabel", "model.widths=[4,8]"], 0, id="multilabel"),
        pytest.param(["experiment=segmentation", "model.width=4"], 0, id="segmentation"),
        pytest.param(
            ["experiment=char_lm", "model.dim=16", "model.depth=1", "data.context=16"],
            0,
            id="language_model",
        ),
        pytest.param(["experiment=gan", "model.width=4", "task.r1=1.0"], 0, id="gan"),
        pytest.param([*DIGITS, *PENALISED], 0, id="penalty and metrics"),
        pytest.param(
            [
                *DIGITS,
                "optimizer=sgd_nesterov",
                "callbacks=[ema]",
                "loader.num_workers=2",
                "trainer.gradient_accumulation_steps=3",
                "trainer.clip_grad_norm=0.1",
                "trainer.gradient_noise={eta: 0.01, gamma: 0.55}",
            ],
            0,
            id="accumulation, clipping, noise, EMA, workers",
        ),
        pytest.param([*DIGITS, "callbacks=[swa]", "callbacks.swa.start_epoch=0"], 0, id="SWA"),
        pytest.param([*DIGITS, "transforms=mixup"], 0, id="mixup"),
        pytest.param([*DIGITS, "transforms=on_device"], 0, id="transforms on the device"),
        pytest.param([*DIGITS, "transforms=on_device", "data.cache=device"], 0, id="data kept"),
        pytest.param([*DIGITS, "transforms=mirrored"], 0, id="views in evaluation"),
        pytest.param(
            [*DIGITS, "trainer.activation_checkpointing=[features.*]"], 0, id="recomputed"
        ),
        pytest.param([*DIGITS, "trainer.precision=fp32"], 1e-4, id="fp32"),
        pytest.param([*DIGITS, "trainer.precision=tf32"], 1e-2, id="tf32"),
        pytest.param([*DIGITS, "trainer.precision=bf16"], 3e-2, id="bf16"),
        pytest.param([*DIGITS, "trainer.precision=fp16"], 3e-2, id="fp16"),
        pytest.param([*DIGITS, "trainer.precision=bf16_true"], 6e-2, id="bf16_true"),
    ],
)
def test_it_trains_as_the_cpu(words, tolerance, monkeypatch):
    if not SIMULATED:  # each device draws its own noise
        words = [word for word in words if not word.startswith("trainer.gradient_noise")]
    with Asked() as asked, sdpa_kernel(SDPBackend.MATH):
        there = trained(words, DEVICE)
    # The loss of pixels and tokens; on a GPU its kernel for images is not deterministic.
    assert "nll_loss2d_forward.default" not in asked.names
    monkeypatch.setattr(parts, "is_async", lambda device: True)  # the same optimizer.fused
    with sdpa_kernel(SDPBackend.MATH):  # others are one rounding off
        here = trained(words, CPU)
    assert len(here["log"]) >= 4
    check_same(there, here, tolerance)


@pytest.mark.parametrize("name", sorted(path.stem for path in TRANSFORMS.glob("*.yaml")))
def test_device_transforms_of_every_choice_do_not_wait(name):
    config = parse(compose([f"transforms={name}", "data=cifar10", "data.root=/nowhere"]).config)
    nodes = with_classes(config.transforms.device, 10)
    if name == "on_device":  # one of its kind for each channel, too
        erase = {
            "_target_": "regimen.data.batch_transforms.RandomErasing",
            "value": [0.1, 0.2, 0.3],
        }
        nodes = {**nodes, "erase_more": erase}
    steps = {key: instantiate(node, _key_=key) for key, node in nodes.items() if node}
    images = torch.randint(256, (6, 3, 32, 32), dtype=torch.uint8)
    if "to_float" in config.transforms.train:  # the workers' images are numbers by then
        images = images / 255
    batch = (images, torch.arange(6))
    batch_slice = BatchSlice(tuple(range(6)), 6, 3, 9, 0, 1, 0, 0)
    expected = DeviceTransforms(steps, seed=1)(batch, batch_slice)
    on_device = DeviceTransforms(steps, seed=1)
    moved = to_device(batch, DEVICE)
    on_device(moved, batch_slice)  # brings its constants there
    with waits() as found:
        result = on_device(moved, batch_slice)
    assert not found
    assert {tensor.device for tensor in result} == {DEVICE}
    check_same(result, expected, 1e-5)


class Launches(TorchDispatchMode):
    """Count the operators that compute or copy to the device."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and not func.is_view and result.device == DEVICE:
            self.count += 1
        return result


def test_device_transforms_launch_few_kernels():
    words = ["transforms=on_device", "data=cifar10", "data.root=/nowhere"]
    nodes = parse(compose(words).config).transforms.device
    steps = {key: instantiate(node, _key_=key) for key, node in nodes.items() if node}
    transforms = DeviceTransforms(steps, seed=1)
    counts = []
    for size in (6, 60):
        images = torch.randint(256, (size, 3, 32, 32), dtype=torch.uint8).to(DEVICE)
        batch_slice = BatchSlice(tuple(range(size)), size, 0, size, 0, 1, 0, 0)
        transforms(images, batch_slice)  # brings its constants there
        with Launches() as launches:
            transforms(images, batch_slice)
        counts.append(launches.count)
    assert counts[0] == counts[1] <= 23


@pytest.mark.skipif(device_count() < 2, reason="needs two accelerators")
def test_a_process_keeps_the_random_states_of_its_own_devices():
    first, second = (torch.device(DEVICE.type, number) for number in range(2))

    def states(*devices):
        return RandomStates(devices, lambda: 0)

    def drawn(device):
        return torch.rand(5, device=device).cpu()

    drawn(first)
    state = through_a_file(states(first).state_dict())
    expected = drawn(first)
    aside = []
    for _ in range(2):
        with rng.seeded(first, seed=1):
            aside.append(drawn(first))
    assert torch.equal(*aside)
    both = states(first, second).state_dict()
    for device in (first, second):
        assert states(device).load_state_dict(state) == []
        assert torch.equal(drawn(device), expected)
    lost = "the random state of 1 devices (this process has 1)"
    assert states(second).load_state_dict(both) == [lost]
    other = f"the random state of {DEVICE.type} on cpu: dropout differs from here on"
    assert states(CPU).load_state_dict(both) == [other]
    assert states(CPU).state_dict()["device"] == {"kind": "cpu", "states": []}
