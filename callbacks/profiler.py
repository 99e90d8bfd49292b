"""Profile some updates with torch's profiler."""

import logging
import os
from dataclasses import dataclass
from functools import partial

from torch import profiler

from regimen.callbacks.support import check_least
from regimen.trainer.callback import Callback
from regimen.trainer.device import device_count
from regimen.trainer.files.atomic import write_text
from regimen.trainer.runs.status import TENSORBOARD
from regimen.trainer.trainer import Trainer

TRACES = "profile"
TABLE = "profile.txt"
_log = logging.getLogger(__name__)


@dataclass(eq=False)
class Profiler(Callback):
    """Record `active` updates, after `wait` idle ones and `warmup` ones whose results are dropped.

    Each recording is a trace in `tensorboard/profile/` of the run directory, for
    https://ui.perfetto.dev; `profile.txt` lists the most expensive operators.
    """

    wait: int = 5
    warmup: int = 2
    active: int = 5
    repeat: int = 1
    record_shapes: bool = False
    profile_memory: bool = False
    with_stack: bool = False
    affects_result = False

    def __post_init__(self) -> None:
        check_least(active=self.active)
        check_least(0, wait=self.wait, warmup=self.warmup, repeat=self.repeat)
        self._profile: profiler.profile | None = None

    def on_fit_start(self, trainer: Trainer) -> None:
        """Start the profiler."""
        if trainer.run_dir is None or not trainer.is_main:
            return
        # torch's tracer prints each start and end to stderr, and errors where there is no GPU.
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")
        schedule = profiler.schedule(
            wait=self.wait, warmup=self.warmup, active=self.active, repeat=self.repeat
        )
        self._profile = profiler.profile(
            schedule=schedule,
            record_shapes=self.record_shapes,
            profile_memory=self.profile_memory,
            with_stack=self.with_stack,
            on_trace_ready=partial(self._write, trainer),
        )
        self._profile.start()

    def on_update_end(self, trainer: Trainer) -> None:
        """Advance the profiler's schedule."""
        if self._profile is not None:
            self._profile.step()

    def teardown(self, trainer: Trainer) -> None:
        """Stop the profiler without writing an incomplete recording."""
        profile = self._profile
        if profile is not None:
            profile.on_trace_ready = None
            profile.stop()
            self._profile = None

    def _write(self, trainer: Trainer, profile: profiler.profile) -> None:
        run_dir = trainer.run_dir
        assert run_dir is not None
        folder = run_dir / TENSORBOARD / TRACES
        folder.mkdir(parents=True, exist_ok=True)
        trace = folder / f"step-{trainer.state.global_step:08}.pt.trace.json"
        profile.export_chrome_trace(str(trace))
        order = "self_device_time_total" if device_count() else "self_cpu_time_total"
        table = profile.key_averages().table(sort_by=order, row_limit=40)
        write_text(run_dir / TABLE, table + "\n")
        _log.info("profile: %s", run_dir / TABLE)
        _log.info("trace: open %s in https://ui.perfetto.dev", trace)
