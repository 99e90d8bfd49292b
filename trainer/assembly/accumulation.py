"""`trainer.gradient_accumulation_steps=auto`: the micro-batches that memory has room for."""

import logging
from dataclasses import replace

import torch

from regimen.conf.errors import lacks_memory
from regimen.conf.schema import Config
from regimen.data.loading.device_transforms import mixes_samples
from regimen.trainer.assembly.experiment import build
from regimen.trainer.assembly.summary import state_bytes
from regimen.trainer.callback import Average
from regimen.trainer.device import (
    empty_caches,
    is_async,
    peak_rss,
    reset_peak_rss,
    spare_memory,
)
from regimen.trainer.errors import ResourceError, describe_value
from regimen.trainer.evaluation import evaluate
from regimen.trainer.rng import seed_everything
from regimen.trainer.strategies.strategy import Strategy
from regimen.trainer.trainer import Trainer

logger = logging.getLogger("regimen")


def find_accumulation_steps(config: Config, strategy: Strategy) -> int:
    """Return the fewest `gradient_accumulation_steps`, a power of two, that memory has room for.

    Builds the experiment for a trial, which computes the gradients of its first micro-batch while
    the memory that the run needs later is reserved. On an accelerator the trial runs out of memory
    or not; on a CPU the peak of the process is compared with `trainer.memory_limit`.
    Collective: all processes try, and take the same number.
    Raises ResourceError where a single sample does not fit, where an evaluation batch does not, and
    where `trainer.compile.mode` records graphs, which allow no second micro-batch.
    """
    steps = 1
    while True:
        options = replace(config.trainer, gradient_accumulation_steps=steps)
        failure, dependent = _tried(replace(config, trainer=options), strategy)
        empty_caches()
        # Collective: if it does not fit on one process, all go on with smaller micro-batches.
        if not any(strategy.group.gather(failure)):
            break
        if steps * strategy.data_parallel_size >= config.loader.batch_size:
            raise ResourceError(
                f"trainer.gradient_accumulation_steps=auto: one sample does not fit: {failure}"
            )
        steps *= 2
        if config.trainer.records_graphs:
            raise ResourceError(
                "trainer.gradient_accumulation_steps=auto: one micro-batch does not fit, and the "
                "graphs that trainer.compile.mode records overwrite gradients that are added up: "
                "lower loader.batch_size, or set trainer.compile=true, which records none"
            )
    if strategy.group.is_main:
        remark = ""
        if dependent:
            remark = f"; the number matters, for {', '.join(dependent)} follow the split"
        logger.info("trainer.gradient_accumulation_steps=auto: %d%s", steps, remark)
    return steps


def _tried(config: Config, strategy: Strategy) -> tuple[str | None, list[str]]:
    """Try the first micro-batch; return why it does not fit, and what depends on the split."""
    seed_everything(config.seed)
    trainer = build(config, strategy).trainer
    states = [state_bytes(optimizer) or 0 for _, optimizer in trainer.optimizers.items()]
    later = sum(states) // strategy.mesh.shards + _average_bytes(trainer)
    trainer.training_model.train()
    reset_peak_rss()
    failure = None
    description = "its transforms"  # what has run out of memory, before there is a batch
    try:
        # The memory of optimizer state and averages, which the first update allocates.
        reserved = torch.empty(later, dtype=torch.uint8, device=strategy.device)
        # For what the trial does not show: other shapes, gaps between freed blocks, collectives.
        spare = torch.empty(
            spare_memory(strategy.device), dtype=torch.uint8, device=strategy.device
        )
        micro_batch = next(trainer.draw(0))[0]
        description = describe_value(micro_batch.batch)
        trainer.updater.dry_run_backward([micro_batch])
        del spare
        if is_async(strategy.device):
            _evaluate_a_batch(trainer, config)
        del reserved
    except RuntimeError as error:
        if not lacks_memory(error):
            raise
        failure = f"{description}: {str(error).partition('.')[0]}"
    trainer.train_loader.close()
    limit = config.trainer.memory_limit
    if limit is not None and not is_async(strategy.device):
        taken = (peak_rss() + later) / 2**30
        if taken > limit:
            failure = f"{description} takes {taken:.2f} GiB, trainer.memory_limit is {limit:g}"
    return failure, accumulation_sensitive_parts(trainer)


def _average_bytes(trainer: Trainer) -> int:
    """Return the bytes of the averages of weights that a run holds from its first update on."""
    averages = sum(1 for callback in trainer.callbacks.values() if isinstance(callback, Average))
    parameters = sum(p.nbytes for p in trainer.model.parameters())
    buffers = sum(b.nbytes for b in trainer.model.buffers())  # on every process, as a whole
    return averages * (parameters // trainer.strategy.mesh.shards + buffers)


def _evaluate_a_batch(trainer: Trainer, config: Config) -> None:
    """Evaluate one batch of each validation set. Raises ResourceError where it does not fit.

    More micro-batches would not help: an evaluation batch is not split into them.
    """
    size = config.loader.eval_batch_size or config.loader.batch_size
    for stage, loader in trainer.val_loaders.items():
        try:
            evaluate(trainer.components, loader, stage, 1, 0, trainer.hooks)
        except RuntimeError as error:
            if not lacks_memory(error):
                raise
            raise ResourceError(
                f"trainer.gradient_accumulation_steps=auto: a batch of {size} samples of {stage} "
                "does not fit: set loader.eval_batch_size to less"
            ) from error
        finally:
            loader.close()


def accumulation_sensitive_parts(trainer: Trainer) -> list[str]:
    """Return what makes an update depend on its split into micro-batches, the exceptions of I3."""
    layers = list(trainer.model.modules())
    device_steps = trainer.train_loader.transforms.steps.values()
    dependent = []
    if any(hasattr(layer, "track_running_stats") for layer in layers):
        dependent.append("BatchNorm's statistics")
    if any("Dropout" in type(layer).__name__ and getattr(layer, "p", 1) for layer in layers):
        dependent.append("dropout masks")
    if any(mixes_samples(step.transform) for step in device_steps):
        dependent.append("mixed samples")
    return dependent
