import contextlib
import fcntl
import logging
import os
import re
import struct
import sys
import termios
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from callbacks import progress as module
from callbacks.progress import Progress
from callbacks.support.errors import CallbackError
from trainer.callback import Callback


class Terminal:
    """A pseudo terminal and all that was written to it."""

    def __init__(self) -> None:
        self._master, slave = os.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 120, 0, 0))
        self.stream = os.fdopen(slave, "w")
        self._read: list[bytes] = []
        self._reader = threading.Thread(target=self._collect)
        self._reader.start()

    def _collect(self) -> None:
        with contextlib.suppress(OSError):  # the last writer has closed it
            while chunk := os.read(self._master, 65536):
                self._read.append(chunk)

    def frames(self) -> list[str]:
        """Return what the line held, each time it was written anew."""
        self.stream.close()
        self._reader.join()
        os.close(self._master)
        return [frame.strip() for frame in re.split(r"[\r\n]+", b"".join(self._read).decode())]


@contextlib.contextmanager
def console(stream: Any = None, logged: bool = True) -> Iterator[None]:
    """Let stderr be `stream`, and set up logging as the command line does, or not at all."""
    root, stderr = logging.getLogger(), sys.stderr
    kept = root.handlers, root.level
    sys.stderr = stream or stderr
    root.handlers = [logging.StreamHandler(sys.stderr)] if logged else []
    root.setLevel(logging.INFO)
    try:
        yield
        assert not any(handler.filters for handler in root.handlers)
    finally:
        sys.stderr = stderr
        root.handlers = kept[0]
        root.setLevel(kept[1])


class Warns(Callback):
    def on_update_end(self, trainer: Any) -> None:
        if trainer.state.global_step == 3:
            logging.getLogger("elsewhere").warning("something happened")


def test_a_terminal_sees_a_bar(make_trainer: Any) -> None:
    terminal = Terminal()
    callbacks = {"progress": Progress(), "warns": Warns()}
    with console(terminal.stream):
        make_trainer(callbacks, log_every_n_steps=1).fit()
    frames = terminal.frames()
    bars = [frame for frame in frames if "|" in frame]
    assert bars[0].startswith("epoch 1/2:   0%|")
    assert "0/5" in bars[0]
    assert any(bar.startswith("epoch 1/2: 100%") and "validating" in bar for bar in bars)
    assert not any("val/loss" in bar for bar in bars)  # it would be shown as if it were new
    assert "steps/s, train/loss" in bars[-1]
    lines = [frame for frame in frames if frame and "|" not in frame]
    assert lines[0] == "something happened"  # on a line of its own
    assert [line.split(":")[0] for line in lines[1:]] == ["epoch 1/2, step 5", "epoch 2/2, step 10"]
    assert re.search(
        r"train/epoch_loss [\d.]+, val/accuracy [\d.]+, val/loss [\d.]+ \([\d.]+ s\)$", lines[1]
    )


@pytest.mark.parametrize("logged", [True, False], ids=["to the log", "printed"])
def test_elsewhere_a_line_closes_an_epoch(make_trainer: Any, capsys: Any, logged: bool) -> None:
    with console(logged=logged):
        make_trainer({"progress": Progress()}).fit()
    lines = capsys.readouterr().err.splitlines()
    assert [line.split(":")[0] for line in lines] == ["epoch 1/2, step 5", "epoch 2/2, step 10"]


def test_now_and_then_a_line_within_an_epoch(
    make_trainer: Any, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = iter(range(0, 1000, 10))  # each look at the clock: 10 s later
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    with console():
        progress = Progress(every_seconds=25)
        make_trainer({"progress": progress}, max_epochs=2, log_every_n_steps=1).fit()
    within = [line for line in capsys.readouterr().err.splitlines() if "left" in line]
    # At 0 s the run begins, at 10 s the epoch; the looks at steps 1 to 4 are at 20, 30, 40 and 50.
    assert len(within) == 2
    # 3 of 10 steps in 40 s: the run has 93 s to go, its second epoch included.
    assert re.fullmatch(
        r"epoch 1/2, 3/5: train/loss [\d.]+ \(0\.1 steps/s, 01:33 left\)", within[0]
    )


def test_a_long_validation_says_how_far_it_is(
    make_trainer: Any, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = iter(range(0, 1000, 10))
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    with console():
        make_trainer({"progress": Progress(every_seconds=10)}, max_epochs=1).fit()
    assert "epoch 1/1: val 1/2 batches" in capsys.readouterr().err


def test_a_resumed_epoch_begins_where_it_was(
    make_trainer: Any, stop_at: Any, carry_over: Any
) -> None:
    terminal = Terminal()
    first, second = make_trainer({"stop": stop_at(3)}), make_trainer({"progress": Progress()})
    first.fit()
    carry_over(first, second)
    with console(terminal.stream):
        second.fit()
    bars = [frame for frame in terminal.frames() if "|" in frame]
    assert re.search(r"epoch 1/2:  60%\|.*\| 3/5 ", bars[0])


def test_a_horizon_in_steps_closes_its_last_epoch(make_trainer: Any, capsys: Any) -> None:
    with console():
        make_trainer({"progress": Progress()}, max_epochs=None, max_steps=7).fit()
    assert "epoch 2, step 7: train/epoch_loss" in capsys.readouterr().err


def test_a_validation_is_told_once_where_it_happened(make_trainer: Any, capsys: Any) -> None:
    rare = {"max_epochs": 3, "validate_every_n_epochs": 2, "validate_every_n_steps": 7}
    with console():
        make_trainer({"progress": Progress()}, **rare).fit()
    lines = capsys.readouterr().err.splitlines()
    told = [(line.split(":")[0], "train/" in line, "val/loss" in line) for line in lines]
    assert told == [
        ("epoch 1/3, step 5", True, False),
        ("epoch 2/3, step 7", False, True),
        ("epoch 2/3, step 10", True, True),
        ("epoch 3/3, step 14", False, True),
        ("epoch 3/3, step 15", True, True),  # the last
    ]


@pytest.mark.parametrize("every", [1, 3, 50])
def test_the_loss_of_an_epoch_is_that_of_its_samples_also_where_a_signal_ends_it(
    make_trainer: Any, stop_at: Any, capsys: Any, every: int
) -> None:
    with console():
        trainer = make_trainer({"progress": Progress(), "s": stop_at(8)}, log_every_n_steps=every)
        losses: list[float] = []
        step = trainer.task.training_step

        def noting(model: Any, batch: Any) -> Any:
            output = step(model, batch)
            losses.append(output.loss.mean().item())
            return output

        trainer.task.training_step = noting
        trainer.fit()
    *_, last = capsys.readouterr().err.splitlines()
    assert last.startswith(f"epoch 2/2, step 8: train/epoch_loss {sum(losses[-3:]) / 3:.4g} (")


def test_only_the_main_process_shows(make_trainer: Any, capsys: Any) -> None:
    trainer = make_trainer({"progress": Progress(bar=True)})
    trainer.group.rank = 1
    with console():
        trainer.fit()
    assert capsys.readouterr().err == ""


def test_option_out_of_range() -> None:
    with pytest.raises(CallbackError):
        Progress(every_seconds=0)
