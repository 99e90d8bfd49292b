"""The configuration of a run, its overrides and its plan, as texts."""

from collections.abc import Iterator

from callbacks.pictures.picture import code_block
from trainer.callback import Callback
from trainer.runs.directory import CONFIG, OVERRIDES
from trainer.trainer import Trainer

PLAN = "plan.txt"


class Texts(Callback):
    """Log the resolved configuration, the overrides and the plan, as `run/...`, once.

    The plan is that of a dry run in the same directory, or else a short one.
    """

    def __init__(self) -> None:
        self._done = False

    def on_epoch_start(self, trainer: Trainer) -> None:
        """Log the texts after the setup of all callbacks; a resumed run has logged them already."""
        if self._done or trainer.resumed or not trainer.is_main or trainer.run_dir is None:
            return
        self._done = True
        texts = {"plan": "\n".join(_short_plan(trainer))}
        for name, file in {"config": CONFIG, "overrides": OVERRIDES, "plan": PLAN}.items():
            if (path := trainer.run_dir / file).is_file():
                texts[name] = path.read_text(encoding="utf-8")
        for name, text in texts.items():
            trainer.log_text(f"run/{name}", code_block(text))


def _short_plan(trainer: Trainer) -> Iterator[str]:
    options, strategy = trainer.options, trainer.strategy
    sizes = [(p.numel(), p.requires_grad) for p in trainer.model.parameters()]
    trained = sum(size for size, trains in sizes if trains)
    yield f"epochs      {options.max_epochs or '-'}, updates {trainer.total_steps or 'unknown'}"
    yield f"devices     {strategy.devices} x {strategy.device.type}, strategy {strategy.name}"
    yield f"precision   {trainer.precision.name}"
    yield f"parameters  {sum(size for size, _ in sizes):,}, trained {trained:,}"
    for callback in trainer.callbacks.values():
        yield from (f"{callback.name}: {line}" for line in callback.explain(trainer))
