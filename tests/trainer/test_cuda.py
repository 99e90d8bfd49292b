"""Tests that need a GPU: whole updates, the copy of a checkpoint, an exact resume."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from benchmarks.gpu import BY_HAND, OURS, Rig, contenders, kernels
from callbacks.checkpoint import Staging
from conf.check import parse
from scripts.composition.compose import compose
from trainer.assembly.experiment import build
from trainer.callback import Callback
from trainer.errors import DivergedError
from trainer.options import TrainerOptions
from trainer.strategies.strategy import Strategy
from trainer.tasks.classification import Classification
from trainer.trainer import Trainer
from trainer.update.precision import NAMES, Precision

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
CUDA = torch.device("cuda", 0)
REPOSITORY = Path(__file__).parents[2]


class Strict(Callback):
    """Fail where the host waits for the device, from the 5th to the 15th update, data included."""

    def on_update_end(self, trainer: Trainer) -> None:
        if trainer.state.updates in (5, 15):
            strict = trainer.state.updates == 5
            torch.cuda.set_sync_debug_mode("error" if strict else "default")


@pytest.mark.parametrize("optimizer", ["sgd", "adamw", "muon"])
@pytest.mark.parametrize("cache", ["none", "device"])
def test_updates_and_their_data_do_not_wait(optimizer: str, cache: str) -> None:
    words = ["experiment=resnet18", "model=small_cnn", f"optimizer={optimizer}", "callbacks=none"]
    words += ["transforms=on_device", f"data.cache={cache}", "trainer.clip_grad_norm=1"]
    words += ["trainer.log_every_n_steps=1000", "trainer.max_steps=20", "loader.batch_size=32"]
    words += ["trainer.precision=bf16", "strategy.devices=1"]
    config = parse(compose(words).config)
    try:
        trainer = build(config, Strategy(CUDA), {"strict": Strict()}).trainer
        trainer.fit()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert trainer.state.global_step == 20


def test_an_update_launches_no_more_kernels_than_by_hand() -> None:
    """What guards against non-finite updates is saved in clipping and sums: see test_kernels.py."""
    rig = Rig(CUDA, None, 6, small=True, mode=None)
    counts = {}
    for who, run in contenders(rig, "resnet18").items():
        run(2)
        counts[who] = kernels(rig, run)
    assert counts[OURS] <= counts[BY_HAND]


@pytest.mark.parametrize("precision", [name for name in NAMES if name != "fp16"])
def test_an_update_that_is_not_finite_is_not_applied(precision: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))
    formats = Precision(precision, "cuda")
    model = formats.convert(model).to(CUDA)
    batches: list[Any] = [(torch.randn(6, 4), torch.randint(3, (6,))) for _ in range(6)]
    batches[3] = (batches[3][0] * float("nan"), batches[3][1])
    kept: dict[int, dict[str, torch.Tensor]] = {}

    class Weights(Callback):
        def on_update_end(self, trainer: Trainer) -> None:
            kept[trainer.state.updates] = {k: v.clone() for k, v in model.state_dict().items()}

    trainer = Trainer(
        model,
        Classification(3),
        torch.optim.AdamW(model.parameters(), fused=True),
        batches,
        strategy=Strategy(CUDA),
        precision=formats,
        callbacks={"weights": Weights()},
        options=TrainerOptions(max_epochs=1, clip_grad_norm=1.0),
    )
    with pytest.raises(DivergedError, match="not finite at update 4"):
        trainer.fit()
    for name, value in model.state_dict().items():
        assert torch.equal(value, kept[3][name]), name


def test_a_copy_for_a_checkpoint_is_that_of_its_moment() -> None:
    weights = torch.randn(4000, 4000, device=CUDA).to(memory_format=torch.contiguous_format)
    staging = Staging()
    for _ in range(2):  # into the same memory
        expected = weights.cpu()
        copies = staging.copy({"weights": weights})
        weights.mul_(-1.5)
        staging.wait()
        assert copies["weights"].is_pinned()
        assert torch.equal(copies["weights"], expected)


def train(run_dir: Path, *words: str) -> dict[str, torch.Tensor]:
    """Train in a process of its own, as cuBLAS reads its settings once; return the weights."""
    command = [sys.executable, "-m", "scripts.train", "experiment=resnet18", f"run_dir={run_dir}"]
    command += ["trainer.deterministic=true", "lr_scheduler=constant", "trainer.max_epochs=null"]
    command += ["trainer.precision=bf16", "transforms=on_device", "loader.batch_size=64"]
    environment = {k: v for k, v in os.environ.items() if k != "CUBLAS_WORKSPACE_CONFIG"}
    done = subprocess.run(
        [*command, *words], cwd=REPOSITORY, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    weights: dict[str, torch.Tensor] = torch.load(run_dir / "checkpoints/last.pt")["model"]
    return weights


@pytest.mark.parametrize("model", ["resnet18", "small_cnn", "vit_tiny"])
def test_a_resume_is_exact(tmp_path: Path, model: str) -> None:
    whole = train(tmp_path / "whole", f"model={model}", "trainer.max_steps=24")
    train(tmp_path / "parts", f"model={model}", "trainer.max_steps=10")
    parts = train(tmp_path / "parts", f"model={model}", "trainer.max_steps=24", "resume=auto")
    for name, value in whole.items():
        assert torch.equal(value, parts[name]), name
