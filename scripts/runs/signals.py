"""Signals during a run: the first ends it after its update, a second Ctrl-C at once."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from regimen.scripts.cli.signals import early_signals, handling, leave_after_second_interrupt
from regimen.trainer.distributed import Group
from regimen.trainer.errors import EXIT_CODES, leave_at_once
from regimen.trainer.state import TrainState


@contextmanager
def stop_signals(state: TrainState, group: Group) -> Iterator[None]:
    """Turn signals into requests to stop within the context; main thread only.

    The handler sets a flag and raises nothing: it may interrupt any code, such as a user's
    `except:` or a swap of random states. Code that waits polls the flag. A signal that arrived
    earlier, and whose exception was swallowed, counts.
    """

    def handle(number: int, frame: FrameType | None) -> None:
        code = EXIT_CODES[signal.Signals(number)]
        if number == signal.SIGINT and state.signal:
            if group.is_main:
                leave_after_second_interrupt()
            leave_at_once(code)
        state.signal = state.signal or (signal.Signals(number).name, code)
        group.on_signal()

    with handling(handle) as restored:
        if early_signals:
            handle(early_signals[-1], None)
        try:
            yield
        except BaseException:
            if group.world_size > 1:
                # A launcher stops the peers of a failed process: this one already ends.
                restored |= dict.fromkeys(restored, signal.SIG_IGN)
            raise
