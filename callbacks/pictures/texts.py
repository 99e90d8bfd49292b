"""The configuration of a run, its overrides and its plan, as texts."""

from regimen.callbacks.pictures.picture import code_block
from regimen.trainer.callback import Callback
from regimen.trainer.runs.directory import CONFIG, OVERRIDES
from regimen.trainer.trainer import Trainer

PLAN = "plan.txt"


class Texts(Callback):
    """Log the resolved configuration, the overrides and the plan, as `run/...`, once.

    The plan is that of a dry run in the same directory.
    """

    def on_epoch_start(self, trainer: Trainer) -> None:
        """Log the texts after the setup of all callbacks; a resumed run has logged them already."""
        if trainer.state.updates or not trainer.is_main or trainer.run_dir is None:
            return
        for name in (CONFIG, OVERRIDES, PLAN):
            path = trainer.run_dir / name
            if path.is_file():
                trainer.log_text(f"run/{path.stem}", code_block(path.read_text("utf-8")))
