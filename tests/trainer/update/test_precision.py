"""Number formats, complex parameters too; recomputed activations: what is stored and computed."""

from functools import partial

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from regimen.trainer.components import precision
from regimen.trainer.components.precision import Precision, format_remark
from regimen.trainer.components.recompute import checkpoint_modules, checkpoint_segments
from regimen.trainer.errors import DivergedError, ModelError
from regimen.trainer.tasks.classification import Classification
from regimen.trainer.trainer import Trainer
from toys import batches, differences, trainer_of


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 3))


def assert_same_gradients(model: nn.Module, other: nn.Module) -> None:
    for a, b in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=0, atol=1e-12)


def trained(precision, model: nn.Module | None = None, first: int = 0, **options) -> Trainer:
    options = {
        "model": model or network(),
        "precision": precision,
        "max_epochs": 1,
        **options,
    }
    options["scheduler"] = partial(torch.optim.lr_scheduler.StepLR, step_size=100)
    trainer = trainer_of(Classification(3), batches(5)[first:], **options)
    trainer.fit()
    return trainer


@pytest.mark.parametrize("clip", [None, 0.1], ids=["unclipped", "clipped"])
@pytest.mark.parametrize(
    ("name", "autocast", "stored"),
    [
        ("fp32", None, torch.float32),
        ("tf32", None, torch.float32),
        ("bf16", torch.bfloat16, torch.float32),
        ("fp16", torch.float16, torch.float32),
        ("bf16_true", None, torch.bfloat16),
        ("fp64", None, torch.float64),
    ],
)
def test_each_format_is_the_loop_written_by_hand(name, autocast, stored, clip) -> None:
    model = network().to(stored)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scaler = torch.amp.GradScaler("cpu", enabled=name == "fp16")
    for x, y in batches(5):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=autocast, enabled=autocast is not None):
            output = model(x.to(stored))
            loss = cross_entropy(output, y)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        scaler.step(optimizer)
        scaler.update()
    ours = trained(name, clip_grad_norm=clip).model

    for a, b in zip(model.parameters(), ours.parameters(), strict=True):
        assert a.dtype == b.dtype == stored
        assert torch.equal(a, b)


def test_an_overflow_moves_nothing_but_the_scale() -> None:
    precision = Precision("fp16")
    precision.scaler = torch.amp.GradScaler("cpu", 2.0**40, backoff_factor=2.0**-15)
    trainer = trained(precision)
    state = trainer.state
    metrics = trainer.metrics

    assert state.global_step == 3
    assert state.updates == 5
    assert state.skipped_updates == 2
    assert trainer.lr_schedule.updates == 3
    assert metrics["train/skipped_updates"] == 2
    assert metrics["train/loss_scale"] == 2.0**10
    assert precision.scale == 2.0**10

    # The same as a run of the three updates that were applied.
    expected_precision = Precision("fp16")
    expected_precision.scaler = torch.amp.GradScaler("cpu", 2.0**10)
    whole = trained(expected_precision, first=2)
    weights = trainer.model.state_dict()
    optimizers = trainer.optimizers.state_dict()["optimizers"]
    expected = whole.optimizers.state_dict()["optimizers"]

    assert differences(weights, whole.model.state_dict()) == []
    assert differences(optimizers, expected) == []


def test_a_scale_that_collapses_ends_the_run() -> None:
    model = network()
    with torch.no_grad():
        model[0].weight[0, 0] = torch.nan
    with pytest.raises(DivergedError, match=r"last 12 updates.*loss scale 16"):
        trained("fp16", model, max_epochs=10, max_skipped_in_a_row=12)


def test_gradients_of_single_elements_share_no_memory() -> None:
    # Their gradient is the 1 that a backward pass begins with, unless it is copied.
    first = nn.Parameter(torch.ones(1))
    second = nn.Parameter(torch.ones(1))
    precision = Precision()
    for _ in range(2):
        precision.backward(first.sum() + second.sum())
    first.grad.mul_(5)
    precision.backward(second.sum())

    assert first.grad.item() == 10
    assert second.grad.item() == 3


def test_a_loss_of_a_class_of_its_own_is_asked_for_its_backward_pass() -> None:
    class Loss(torch.Tensor):
        called = 0

        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):
            if func is torch.Tensor.backward:
                cls.called += 1
            return super().__torch_function__(func, types, args, kwargs or {})

    parameter = nn.Parameter(torch.ones(3))
    loss = parameter.sum().as_subclass(Loss)
    Precision().backward(loss)

    assert Loss.called == 1
    assert parameter.grad.tolist() == [1, 1, 1]


def test_complex_parameters_keep_their_precision_and_are_not_scaled() -> None:
    model = nn.Linear(2, 2, bias=False, dtype=torch.complex64)
    before = model.weight.detach().clone()

    with pytest.raises(ModelError, match="complex gradients; use fp32, bf16"):
        Precision("fp16").convert(model)

    half = Precision("bf16_true").convert(model)
    assert torch.equal(half.weight, before)

    double = Precision("fp64").convert(model)
    assert double.weight.dtype == torch.complex128


class Rotary(nn.Module):
    """Two buffers of the same values, of which one has the name of rotary frequencies."""

    def __init__(self) -> None:
        super().__init__()
        values = torch.tensor([0.1, 0.01])
        self.register_buffer("inv_freq", values.clone(), persistent=False)
        self.register_buffer("table", values.clone(), persistent=False)


def test_frequencies_of_positions_are_not_rounded_and_other_buffers_are() -> None:
    exact = torch.tensor([0.1, 0.01])
    rotary = Rotary()
    model = nn.Sequential(rotary)
    Precision("bf16_true").convert(model)

    assert torch.equal(rotary.inv_freq, exact)
    assert torch.equal(rotary.table, exact.to(torch.bfloat16))

    Precision("fp64").convert(model)
    assert torch.equal(rotary.inv_freq, exact.double())


@pytest.mark.parametrize(
    "apply",
    [
        pytest.param(lambda m: checkpoint_modules(m, ["0", "0.*", "1"]), id="globs"),
        pytest.param(lambda m: checkpoint_segments(m, 1), id="one-segment"),
        pytest.param(lambda m: checkpoint_segments(m, 2), id="segments"),
        pytest.param(lambda m: checkpoint_segments(m, 4), id="a-segment-a-layer"),
    ],
)
def test_gradients_and_statistics_are_those_without_checkpointing(apply) -> None:
    plain = convolutions()
    saving = convolutions()
    apply(saving)
    x = torch.randn(5, 1, 8, 8, dtype=torch.float64, requires_grad=True)
    for model in (plain, saving):
        for step in range(3):
            torch.manual_seed(step)
            loss = model(x).square().mean()
            if step == 2:  # a penalty on gradients goes back through a pass twice
                (slope,) = torch.autograd.grad(loss, x, create_graph=True)
                loss = loss + slope.square().sum()
            loss.backward()

    assert_same_gradients(plain, saving)
    assert plain.state_dict().keys() == saving.state_dict().keys()
    assert differences(plain.state_dict(), saving.state_dict()) == []


@pytest.mark.parametrize(
    "apply",
    [
        pytest.param(lambda m: checkpoint_modules(m, ["0", "1"], compiled=True), id="globs"),
        pytest.param(lambda m: checkpoint_segments(m, 2, compiled=True), id="segments"),
    ],
)
def test_compiled_it_recomputes_the_same(apply) -> None:
    """The second of its BatchNorms, without a momentum, is not compiled as one graph."""
    plain = convolutions()
    saving = convolutions()
    apply(saving)
    torch.compiler.reset()
    compiled = torch.compile(saving, backend="aot_eager", dynamic=False)
    for step in range(2):
        x = torch.randn(5, 1, 8, 8, dtype=torch.float64)
        for model in (plain, compiled):
            torch.manual_seed(step)
            loss = model(x).square().mean()
            loss.backward()

    assert_same_gradients(plain, saving)
    assert differences(plain.state_dict(), saving.state_dict()) == []


class Old:
    """A device before the units for bfloat16, as torch.cuda tells of a T4."""

    @staticmethod
    def is_bf16_supported(including_emulation: bool = True) -> bool:
        return including_emulation

    @staticmethod
    def is_tf32_supported() -> bool:
        return False

    @staticmethod
    def get_device_name(device: torch.device) -> str:
        return "Tesla T4"


class Unaware:
    """A device of a vendor that knows of no emulation."""

    @staticmethod
    def is_bf16_supported() -> bool:
        return True


@pytest.mark.parametrize(
    ("module", "name", "said"),
    [
        pytest.param(Old, "bf16", "trainer.precision=bf16: Tesla T4 emulates bfloat16", id="bf16"),
        pytest.param(Old, "bf16_true", "bf16_true: Tesla T4 emulates bfloat16", id="bf16_true"),
        pytest.param(Old, "tf32", "trainer.precision=tf32: Tesla T4 has no TF32 units", id="tf32"),
    ],
)
def test_a_format_without_units_for_it_is_told(module, name, said, monkeypatch) -> None:
    monkeypatch.setattr(torch, "get_device_module", lambda device: module)
    remark = format_remark("trainer.precision", name, torch.device("cuda", 0))
    assert remark is not None
    assert said in remark


@pytest.mark.parametrize(
    ("module", "name"),
    [
        pytest.param(Old, "fp16", id="fp16"),
        pytest.param(Old, "fp32", id="fp32"),
        pytest.param(Unaware, "bf16", id="a device that does not know"),
        pytest.param(Unaware, "tf32", id="a device that does not say"),
    ],
)
def test_a_format_with_units_for_it_or_of_an_unknown_device_is_not(
    module, name, monkeypatch
) -> None:
    monkeypatch.setattr(torch, "get_device_module", lambda device: module)
    assert format_remark("trainer.precision", name, torch.device("cuda", 0)) is None


@pytest.mark.parametrize(
    ("flags", "name", "told"),
    [
        pytest.param("avx2", "bf16", True, id="bf16"),
        pytest.param("avx2", "bf16_true", True, id="bf16_true"),
        pytest.param("avx2 avx512_bf16", "bf16", False, id="with units"),
        pytest.param("avx2 avx512_bf16", "fp16", True, id="fp16"),
        pytest.param("avx2", "fp32", False, id="fp32"),
    ],
)
def test_so_is_one_that_a_cpu_emulates(flags, name, told, tmp_path, monkeypatch) -> None:
    cpu_info = tmp_path / "cpuinfo"
    cpu_info.write_text(f"flags : {flags}\n")
    monkeypatch.setattr(precision, "_CPU_INFO", cpu_info)
    remark = format_remark("trainer.precision", name, torch.device("cpu"))

    assert (remark is not None) == told


def kept_for_the_backward_pass(model: nn.Module) -> int:
    """Return how many numbers the forward pass keeps."""
    kept = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        kept.append(tensor.numel())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model(torch.randn(5, 1, 8, 8, dtype=torch.float64))
    return sum(kept)


def test_activations_are_really_dropped() -> None:
    by_modules = convolutions()
    checkpoint_modules(by_modules, ["0", "1"])
    by_segments = convolutions()
    checkpoint_segments(by_segments, 1)

    plain = kept_for_the_backward_pass(convolutions())

    assert kept_for_the_backward_pass(by_modules) < plain / 2
    assert kept_for_the_backward_pass(by_segments) < plain / 2


def test_the_outermost_match_wins_and_what_cannot_be_cut_is_refused() -> None:
    assert checkpoint_modules(convolutions(), ["*"]) == ["0", "1", "2", "3"]
    with pytest.raises(ModelError, match="layer9"):
        checkpoint_modules(convolutions(), ["layer9.*"])
    for model in (nn.Linear(2, 2), nn.Sequential(nn.ReLU())):  # too few to cut
        with pytest.raises(ModelError, match=r"trainer\.activation_checkpointing_segments"):
            checkpoint_segments(model, 2)


def convolutions() -> nn.Sequential:
    torch.manual_seed(1)
    first = nn.Sequential(
        nn.Conv2d(1, 4, 3),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.Dropout(0.3),
    )
    second = nn.Sequential(
        nn.Conv2d(4, 4, 3),
        nn.BatchNorm2d(4, momentum=None),
        nn.ReLU(),
    )
    head = nn.Linear(4 * 16, 3)
    return nn.Sequential(first, second, nn.Flatten(), head).double()
