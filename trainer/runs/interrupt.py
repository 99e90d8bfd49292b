"""Ctrl-C while a script or a notebook trains: the training stops after its update."""

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from regimen.trainer.callback import saver_of
from regimen.trainer.components.components import Components
from regimen.trainer.errors import EXIT_CODES


@contextmanager
def stopping_on_interrupt(components: Components, run_dir: Path | None) -> Iterator[None]:
    """Turn a first Ctrl-C into a stop after the update; tell in one line how to continue.

    The handler raises nothing the first time: it may interrupt a save, or an optimizer between
    two parameters. A second Ctrl-C raises KeyboardInterrupt at once. If the signal has another
    handler already, as in the command `train`, nothing is changed.
    """
    process = os.getpid()
    in_main_thread = threading.current_thread() is threading.main_thread()
    handler = signal.getsignal(signal.SIGINT)
    if in_main_thread and handler is not signal.default_int_handler:
        yield
        return
    pressed = False

    def handle(number: int, frame: FrameType | None) -> None:
        nonlocal pressed
        if os.getpid() != process:  # a worker that was forked: its parent ends it
            return
        if pressed:
            raise KeyboardInterrupt
        pressed = True
        components.state.signal = "SIGINT", EXIT_CODES[signal.SIGINT]
        components.group.on_signal()

    if in_main_thread:  # Python lets no other thread set a handler
        signal.signal(signal.SIGINT, handle)
    try:
        yield
        if pressed:
            raise KeyboardInterrupt
    except KeyboardInterrupt as error:
        _explain(error, components, run_dir)
        raise
    finally:
        if in_main_thread:
            signal.signal(signal.SIGINT, handler)


def resume_call(run_dir: Path | None) -> str:
    """Return what to type in Python to go on with a run."""
    return f"Trainer(..., run_dir={str(run_dir)!r}).fit(resume='auto')"


def _explain(error: KeyboardInterrupt, components: Components, run_dir: Path | None) -> None:
    """Give a KeyboardInterrupt a message: where the training stopped and how to continue.

    Its type stays: Python exits with 130 for a KeyboardInterrupt, and for no subclass of it.
    """
    state = components.state
    place = state.where
    if state.position:
        place = f"update {state.position} of epoch {state.epoch}, step {state.global_step}"
    text = f"stopped after {place}; trainer.fit() goes on"
    if state.stop_code == 0:  # raised in the middle of an update
        text = f"stopped at once, after {place}; trainer.fit() goes on"
    saves = saver_of(components.callbacks) is not None and run_dir is not None
    if saves and state.updates:
        text += f", and {resume_call(run_dir)} later"
    error.args = (text,)
    # IPython and Jupyter show this in place of a traceback.
    vars(error)["_render_traceback_"] = lambda *_: [f"KeyboardInterrupt: {text}"]
