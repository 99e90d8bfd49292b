# ruff: noqa: RUF009 -- `option` returns a dataclasses.field, which is what belongs there
"""The keys of `trainer`: how long, how often, in which numbers."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from conf.compile_options import compile_problems
from conf.errors import Problem
from conf.fields import duration, option, share


@dataclass(kw_only=True, slots=True)
class GradientNoiseConfig:
    """Gaussian noise on gradients, of variance eta / (1 + step) ** gamma (Neelakantan 2015)."""

    eta: float = option(0.01, "variance at the first step", above=0)
    gamma: float = option(0.55, "how fast it decays", at_least=0)


@dataclass(kw_only=True, slots=True)
class TrainerConfig:
    """The loop. A step is an optimizer update, whatever it was accumulated from."""

    max_epochs: int | None = option(10, "passes over the training set", at_least=1)
    max_steps: int | None = option(None, "updates; whichever limit comes first ends", at_least=1)
    max_time: float | str | None = option(
        None, "seconds, or 'hours:minutes:seconds' in quotes", above=0, check=duration
    )
    precision: Literal["fp32", "tf32", "bf16", "fp16", "bf16_true", "fp64"] = option(
        "fp32", "bf16 and fp16 are autocast; bf16_true and fp64 hold the weights in that format"
    )
    gradient_accumulation_steps: int = option(
        1, "micro-batches that batch_size is split into: less memory, the same result", at_least=1
    )
    on_nonfinite: Literal["stop", "skip"] = option(
        "stop", "an update that is NaN or infinite: end the run (exit 5), or leave it out"
    )
    max_skipped_in_a_row: int = option(
        20, "updates left out one after the other end it", at_least=1
    )
    clip_grad_norm: float | None = option(None, "bound on the norm of the gradients", above=0)
    clip_grad_norm_type: float = option(
        2.0, "p of that norm; .inf = largest", above=0, infinite=True
    )
    clip_grad_per_group: bool = option(False, "bound each parameter group by itself")
    clip_grad_value: float | None = option(None, "bound on each gradient entry", above=0)
    error_if_nonfinite: bool = option(
        False, "a NaN or infinite norm ends the run, even with `skip`"
    )
    gradient_noise: GradientNoiseConfig | None = option(None, "noise added to gradients")
    activation_checkpointing: list[str] | None = option(
        None, "globs over module names whose activations are recomputed: less memory, more time"
    )
    activation_checkpointing_segments: int | None = option(
        None, "cut an nn.Sequential into so many recomputed parts", at_least=1
    )
    compile: bool | dict[str, Any] = option(
        False,
        "torch.compile, or its mode, dynamic, fullgraph, backend and (numeric) options;"
        " `dynamic: false` if not given",
    )
    channels_last: bool = option(False, "memory format of images: faster convolutions")
    tf32: bool = option(False, "TensorFloat32 for float32 products, as in precision=tf32")
    cudnn_benchmark: bool = option(False, "let cuDNN try its algorithms: faster, not repeatable")
    deterministic: bool = option(False, "only algorithms that repeat bit by bit; slower on a GPU")
    detect_anomaly: bool = option(False, "find the operation that made a NaN; slow")
    log_every_n_steps: int = option(50, "updates between two lines of metrics", at_least=1)
    validate_every_n_epochs: int | None = option(1, "null = never by epochs", at_least=1)
    validate_every_n_steps: int | None = option(None, "null = never by steps", at_least=1)
    validate_at_start: int = option(
        0, "validation batches tried before training, to fail early", at_least=0
    )
    limit_train_batches: int | float | None = option(
        None, "updates of an epoch: a number, or a fraction such as 0.1", at_least=0, check=share
    )
    limit_val_batches: int | float | None = option(
        None, "the same for validation; 0 = none", at_least=0, check=share
    )
    limit_test_batches: int | float | None = option(
        None, "the same for the test; 0 = none", at_least=0, check=share
    )
    overfit_batches: int | float | None = option(
        None, "train and validate on these few batches, unshuffled", at_least=0, check=share
    )

    def conflicts(self) -> Iterator[Problem]:
        """Name what cannot be meant."""
        if self.max_epochs is None and self.max_steps is None and self.max_time is None:
            yield Problem(
                "max_epochs", "null, as are max_steps and max_time: nothing would end the run"
            )
        if isinstance(self.compile, dict):
            yield from compile_problems(self.compile)
        for key in ("limit_train_batches", "overfit_batches"):
            if getattr(self, key) == 0:
                yield Problem(key, "0 leaves nothing to train on; null = no limit")
        if self.clip_grad_per_group and self.clip_grad_norm is None:
            yield Problem("clip_grad_per_group", "has no effect without clip_grad_norm")
