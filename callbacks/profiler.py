"""Profile some updates with torch's profiler."""

from __future__ import annotations

import json
import logging
import os
import socket
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import profiler

from callbacks.support.xplane import xspace
from trainer.callback import Callback
from trainer.files.atomic import replacing, write_text
from trainer.runs.dashboard import FOLDER, SESSIONS, command

if TYPE_CHECKING:
    from trainer.trainer import Trainer

TRACES, TABLE = "profile", "profile.txt"
_log = logging.getLogger(__name__)


class Profiler(Callback):
    """Record `active` updates, after `wait` idle ones and `warmup` ones whose results are dropped.

    Each recording is a trace in `tensorboard/profile/` of the run directory, for
    https://ui.perfetto.dev, and once more in the form of TensorBoard's Profile tab;
    `profile.txt` lists the most expensive operators.
    """

    def __init__(
        self,
        wait: int = 5,
        warmup: int = 2,
        active: int = 5,
        repeat: int = 1,
        record_shapes: bool = False,
        profile_memory: bool = False,
        with_stack: bool = False,
    ) -> None:
        self._schedule = profiler.schedule(wait=wait, warmup=warmup, active=active, repeat=repeat)
        self._record_shapes = record_shapes
        self._profile_memory = profile_memory
        self._with_stack = with_stack
        self._profile: profiler.profile | None = None
        self._folder = Path()
        self._step = 0  # where a recording ends

    def on_fit_start(self, trainer: Trainer) -> None:
        """Start the profiler."""
        if trainer.run_dir is None or not trainer.is_main:
            return
        self._folder = trainer.run_dir
        # torch's tracer prints each start and end to stderr, and errors where there is no GPU.
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")
        self._profile = profiler.profile(
            activities=_activities(),
            schedule=self._schedule,
            on_trace_ready=self._write,
            record_shapes=self._record_shapes,
            profile_memory=self._profile_memory,
            with_stack=self._with_stack,
        )
        self._profile.start()

    def on_update_end(self, trainer: Trainer) -> None:
        """Advance the profiler's schedule."""
        if self._profile is not None:
            self._step = trainer.state.global_step
            self._profile.step()

    def teardown(self, trainer: Trainer) -> None:
        """Stop the profiler without writing an incomplete recording."""
        if self._profile is not None:
            self._profile.on_trace_ready = None
            self._profile.stop()
            self._profile = None

    def _write(self, profile: profiler.profile) -> None:
        name = f"step-{self._step:08}"
        trace = self._folder / FOLDER / TRACES / f"{name}.pt.trace.json"
        trace.parent.mkdir(parents=True, exist_ok=True)
        profile.export_chrome_trace(str(trace))
        _write_session(trace, self._folder / FOLDER / SESSIONS / name)
        key = "self_cuda_time_total" if torch.cuda.is_available() else "self_cpu_time_total"
        table = profile.key_averages().table(sort_by=key, row_limit=40)
        write_text(self._folder / TABLE, table + "\n")
        _log.info("profile: %s", self._folder / TABLE)
        _log.info("trace: open %s in https://ui.perfetto.dev", trace)
        tab = "Trace Viewer in the Profile tab (pip install xprof)"
        _log.info("trace: or look at %s: %s", tab, command(self._folder))


def _write_session(trace: Path, session: Path) -> None:
    host = socket.gethostname()
    session.mkdir(parents=True, exist_ok=True)
    content = xspace(json.loads(trace.read_text(encoding="utf-8")), host)
    with replacing(session / f"{host}.xplane.pb") as file:
        file.write(content)


def _activities() -> list[profiler.ProfilerActivity]:
    kinds = [profiler.ProfilerActivity.CPU]
    return [*kinds, profiler.ProfilerActivity.CUDA] if torch.cuda.is_available() else kinds
