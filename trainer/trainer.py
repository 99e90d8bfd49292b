"""The loop: updates, boundaries, evaluation; everything else is a collaborator."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from trainer.batch import BatchSource, MicroBatch, as_source, to_device, updates
from trainer.callback import Callback, Hooks
from trainer.errors import DivergedError
from trainer.gradients import Clipping, clip, is_finite, total_norm
from trainer.lr_schedule import LRSchedule
from trainer.metrics import Sums, add_up_terms
from trainer.nonfinite import Guard
from trainer.optimizers import Optimizers, needs_closure
from trainer.precision import Precision
from trainer.rng import get_rng_state, set_rng_state
from trainer.state import TrainState
from trainer.strategy import Strategy
from trainer.task import SUM, StepOutput, Task
from trainer.timer import Timer
