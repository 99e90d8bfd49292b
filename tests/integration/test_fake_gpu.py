"""What a GPU would be asked to do, on a machine without one: its tensors have no numbers.

A fake tensor knows its device: tensors of two devices in one operation are an error, as on a GPU,
and so is every question about a number, for which the host would wait.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from conf.check import parse
from data.batch import Piece, to_device
from data.loading.device_transforms import DeviceTransforms
from data.loading.loader import Kept, Loader
from data.orders import Shuffled
from data.samplers import UpdateSampler
from data.sources import ImageTensors
from data.transforms import Standardize, ToFloat
from models.gan import GAN as Networks  # noqa: N811
from scripts.cli.arguments import parse_arguments
from scripts.composition.compose import compose
from trainer.assembly.parts import with_classes
from trainer.targets.instantiate import instantiate
from trainer.task import Task
from trainer.tasks.classification import Classification
from trainer.tasks.gan import GAN
from trainer.tasks.language_model import LanguageModel
from trainer.tasks.losses import Term, vector
from trainer.tasks.metrics import MacroF1, PerClassAccuracy
from trainer.tasks.multilabel import MultiLabel
from trainer.tasks.penalties import GradientPenalty
from trainer.tasks.regression import Regression
from trainer.tasks.segmentation import Segmentation
from trainer.update.sums import Sums

CUDA = torch.device("cuda", 0)
TRANSFORMS = Path(__file__).parents[2] / "conf" / "transforms"
NAMES = sorted(path.stem for path in TRANSFORMS.glob("*.yaml"))


class FakeGPU(TorchDispatchMode):
    """Compute with real numbers on the CPU and with none on `cuda:0`; keep what was asked of it."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[str] = []
        self.to_host: list[str] = []
        self.sent: list[int] = []  # bytes to the device

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        leaves = tree_leaves((args, kwargs))
        fakes = [leaf for leaf in leaves if isinstance(leaf, FakeTensor)]
        if func is torch.ops.aten._pin_memory.default:  # there is nothing to pin for
            return args[0].clone()
        devices = [torch.device(leaf) for leaf in leaves if isinstance(leaf, torch.device)]
        if not fakes and not any(device.type == "cuda" for device in devices):
            with unset_fake_temporarily():
                return func(*args, **kwargs)
        self.asked.append(str(func))
        if any(fake.is_cuda for fake in fakes) and any(d.type == "cpu" for d in devices):
            self.to_host.append(str(func))
        result = func(*args, **kwargs)
        given = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        made = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        if given and not any(t.is_cuda for t in given) and any(t.is_cuda for t in made):
            self.sent.append(sum(tensor.nbytes for tensor in given))
        return result


@pytest.fixture
def gpu() -> Iterator[FakeGPU]:
    with FakeTensorMode(allow_non_fake_inputs=True), FakeGPU() as mode:
        yield mode


def test_the_fake_notices_what_a_gpu_would_not_do(gpu: FakeGPU) -> None:
    there, here = torch.ones(3, device=CUDA), torch.ones(3)
    assert float(here.sum()) == 3
    with pytest.raises(RuntimeError, match="device"):
        there + here
    with pytest.raises(Exception, match=r"_local_scalar_dense"):
        there.sum().item()
    there.cpu()
    assert len(gpu.to_host) == 1


@pytest.mark.parametrize("name", NAMES)
def test_the_device_transforms_of_every_choice_stay_on_the_device(gpu: FakeGPU, name: str) -> None:
    overrides = [f"transforms={name}", "data=cifar10", "data.root=/nowhere"]
    config = parse(compose(parse_arguments(overrides)).config)
    nodes = with_classes(config.transforms.device, 10)
    steps = {key: instantiate(node, _key_=key) for key, node in nodes.items() if node}
    if name == "on_device":  # one of its kind for each channel, too
        erase = {"_target_": "data.batch_transforms.RandomErasing", "value": [0.1, 0.2, 0.3]}
        steps["erase_more"] = instantiate(erase, _key_="erase_more")
    transforms = DeviceTransforms(steps, seed=1)
    needs_numbers = name in ("mixup", "cutmix", "mixup_cutmix")  # those of the workers' images
    dtype = torch.float32 if needs_numbers else torch.uint8
    images, labels = torch.zeros(6, 3, 32, 32, dtype=dtype), torch.arange(6)
    batch = to_device((images, labels), CUDA)
    piece = Piece(tuple(range(6)), 6, 3, 9, 0, 1, 0, 0)
    for _ in range(2):
        moved, targets = transforms(batch, piece)
        assert moved.device == targets.device == CUDA
        assert moved.shape[0] == 6
    assert gpu.to_host == []


def penalised() -> Task:
    score = nn.CrossEntropyLoss(reduction="sum")
    terms: dict[str, nn.Module | None] = {
        "weighted": nn.CrossEntropyLoss(weight=vector([1, 2, 3])),
        "penalty": Term(GradientPenalty(loss=score), 0.1),
    }
    metrics = {"each": PerClassAccuracy(3), "f1": MacroF1(3)}
    return Classification(3, terms, top_k=(1, 2), metrics=metrics)  # type: ignore[arg-type]


ROWS, PICTURES = torch.zeros(8, 5), torch.zeros(4, 1, 8, 8)
TOKENS, MASKS = (torch.zeros(*shape, dtype=torch.int64) for shape in ((4, 7), (4, 8, 8)))
CASES: dict[str, Any] = {
    "classification": lambda: (penalised(), nn.Linear(5, 3), ROWS, torch.arange(8) % 3),
    "regression": lambda: (Regression(), nn.Linear(5, 1), ROWS, torch.zeros(8)),
    "multilabel": lambda: (MultiLabel(), nn.Linear(5, 3), ROWS, torch.ones(8, 3)),
    "segmentation": lambda: (Segmentation(3), nn.Conv2d(1, 3, 1), PICTURES, MASKS),
    "language_model": lambda: (LanguageModel(4), nn.Embedding(4, 4), TOKENS, TOKENS),
    "gan": lambda: (GAN(r1=1.0), Networks(1, 8, 5, 4), PICTURES, torch.zeros(4, 5)),
}


def step(task: Task, model: nn.Module, batch: Any) -> Sums:
    """Go forward over a batch in training and evaluation; return what is summed."""
    sums = Sums(CUDA)
    for turn in task.turns or [""]:
        output = task.turn_step(model, batch, turn) if turn else task.training_step(model, batch)
        sums.add_output(output, 4, f"loss_{turn}")
    task.counts(batch)
    with torch.no_grad():
        sums.add_output(task.evaluation_step(model, batch), 4)
    return sums


def gradients(outputs: Any, inputs: Any, **options: Any) -> tuple[Tensor, ...]:
    """Stand in for autograd, whose threads would ask the driver for the device."""
    return tuple(torch.zeros_like(i) for i in (inputs if isinstance(inputs, list) else [inputs]))


@pytest.mark.parametrize("name", list(CASES))
def test_a_step_of_every_task_and_its_metrics_stay_on_the_device(
    gpu: FakeGPU, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.autograd, "grad", gradients)
    task, model, *batch = CASES[name]()
    batch = to_device(tuple(batch), CUDA)
    with torch.no_grad():
        parameters = {n: p.to(CUDA).requires_grad_() for n, p in model.named_parameters()}
        buffers = {n: b.to(CUDA) for n, b in model.named_buffers()}
    task.to(CUDA)
    gpu.asked.clear()

    def there(*inputs: Any, **named: Any) -> Any:
        return torch.func.functional_call(model, {**parameters, **buffers}, inputs, named)

    there.parameters = lambda: list(parameters.values())  # type: ignore[attr-defined]
    step(task, there, batch)  # type: ignore[arg-type]
    for metric in task.metrics().values():
        assert metric.total.device == CUDA  # type: ignore[attr-defined]
    assert gpu.to_host == []
    # Classes of pixels and tokens: these have no deterministic kernel on a GPU.
    assert not [kernel for kernel in gpu.asked if "nll_loss2d" in kernel]
    if name in ("segmentation", "language_model"):
        assert "aten.nll_loss_forward.default" in gpu.asked


def test_what_is_kept_on_the_device_is_not_sent_again(gpu: FakeGPU) -> None:
    images = torch.zeros(20, 3, 4, 4, dtype=torch.uint8)
    dataset = ImageTensors(images, torch.arange(20), ["one"])
    sampler = UpdateSampler(Shuffled(20, 0), batch_size=6)
    steps = DeviceTransforms({"float": ToFloat(), "standard": Standardize([0.5] * 3, [0.2] * 3)}, 0)
    place: Any = {"kept": Kept(dataset, CUDA, 10**6), "device": CUDA, "prefetch": False}
    loader = Loader(dataset, sampler, seed=0, transforms=steps, **place)
    sizes = []
    for epoch in range(2):
        gpu.sent.clear()
        assert all(leaf.is_cuda for micro in loader.epoch(epoch) for leaf in micro.batch)
        sizes.append(sorted(gpu.sent))
    assert sizes[0][-1] == images.nbytes
    assert sizes[1] == [2 * 8, *[6 * 8] * 3]  # numbers of samples
    assert gpu.to_host == []
