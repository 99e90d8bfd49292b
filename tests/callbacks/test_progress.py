import contextlib
import logging
import os
import re
import sys
import termios
import threading
from types import SimpleNamespace

import pytest

from regimen.callbacks import progress as module
from regimen.callbacks.progress import Progress
from regimen.trainer.callback import Callback, Saver, losses_of
from toys import StopAt

_PART = re.compile(r"\x1b\[(\d*)([A-Za-z])|(.)", re.DOTALL)


class Terminal:
    """A pseudo terminal of a width, and all that is written to it.

    `stream` writes to it; `frames` and `rows` close it.
    """

    def __init__(self, columns=120):
        self.columns = columns
        self._master, self.slave = os.openpty()
        termios.tcsetwinsize(self.slave, (24, columns))
        self.stream = os.fdopen(self.slave, "w", encoding="utf-8")
        self._read = []
        self._reader = threading.Thread(target=self._collect)
        self._reader.start()

    def text(self):
        """Close the terminal and return all that was written."""
        if not self.stream.closed:
            self.stream.close()
            self._reader.join()
            os.close(self._master)
        return b"".join(self._read).decode()

    def frames(self):
        """Return what a line held, each time it was written anew."""
        found = re.split(r"[\r\n]+|\x1b\[\d*[AK]", self.text())
        return [frame.rstrip() for frame in found if frame.strip()]

    def rows(self):
        """Return what the terminal shows in the end; AssertionError for an unknown code."""
        rows = [[]]
        row = column = 0
        for number, letter, sign in _PART.findall(self.text()):
            if sign == "\n":
                row += 1
            elif sign == "\r":
                column = 0
            elif letter == "A":
                row = max(0, row - int(number or 1))
            elif letter == "K":
                del rows[row][column:]
            else:
                assert sign, f"the terminal of the tests does not know ESC [ {number}{letter}"
                if column == self.columns:
                    row, column = row + 1, 0
                rows += [[] for _ in range(row + 1 - len(rows))]
                rows[row] += " " * (column + 1 - len(rows[row]))
                rows[row][column] = sign
                column += 1
            rows += [[] for _ in range(row + 1 - len(rows))]
        return ["".join(row).rstrip() for row in rows]

    def _collect(self):
        with contextlib.suppress(OSError):  # the last writer has closed it
            while chunk := os.read(self._master, 65536):
                self._read.append(chunk)


@contextlib.contextmanager
def console(stream=None, logged=True):
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


@pytest.fixture(autouse=True)
def _terminal(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    for name in ("COLUMNS", "LINES", "NO_COLOR"):
        monkeypatch.delenv(name, raising=False)


class Warns(Callback):
    def on_update_end(self, trainer):
        if trainer.state.global_step == 3:
            logging.getLogger("elsewhere").warning("something happened")


class Judge(Saver):
    """Monitors a metric, and saves nothing."""

    def __init__(self, before=None):
        self._before = before

    @property
    def monitor(self):
        return "val/loss"

    def best_result(self):
        return None if self._before is None else ("val/loss", self._before, 1)

    def improves(self, value, than):
        return than is None or value < than


RUN = re.compile(r"run: +(\d+)%\|[^|]*\| (\d+/\d+) \[.*")
EPOCH = re.compile(r"epoch (\d)/2: +(\d+)%\|[^|]*\| (\d/5) \[(.*)")


def test_a_terminal_sees_the_run_above_its_epoch(make_trainer, tmp_path):
    terminal = Terminal()
    callbacks = {"progress": Progress(), "warns": Warns(), "judge": Judge()}
    with console(terminal.stream):
        logging.getLogger().addHandler(logging.FileHandler(tmp_path / "log"))
        uneven = {"max_epochs": 2, "validate_every_n_epochs": 2, "log_every_n_steps": 1}
        make_trainer(callbacks, tmp_path / "run", **uneven).fit()
    bars = [frame for frame in terminal.frames() if "|" in frame]
    runs = [found.groups() for bar in bars if (found := RUN.fullmatch(bar))]
    epochs = [found.groups() for bar in bars if (found := EPOCH.fullmatch(bar))]
    assert len(runs) + len(epochs) == len(bars)
    assert (runs[0], epochs[0][:3]) == (("0", "0/10"), ("1", "0", "0/5"))
    assert any(epoch[:2] == ("2", "100") and "validating" in epoch[3] for epoch in epochs)
    assert any("train/loss" in epoch[3] for epoch in epochs)
    assert not any("val/loss" in bar for bar in bars)  # it would be shown as if it were new
    rows = [row.split() for row in terminal.rows() if row]  # the bars are gone
    columns, metrics = ["epoch", "step", "time", "best"], ["val/accuracy", "val/loss"]
    assert [row[:2] for row in rows] == [
        ["something", "happened"],
        columns[:2],
        ["1/2", "5"],
        columns[:2],  # there are more
        ["2/2", "10"],
    ]
    assert rows[3] == [*columns, "train/epoch_loss", *metrics]
    assert ["*" in row for row in rows[-3:]] == [False, False, True]
    lines = (tmp_path / "log").read_text().splitlines()  # whose file has lines as ever
    line = r"epoch 2/2, step 10: train/epoch_loss [\d.]+, val/accuracy [\d.]+, val/loss [\d.]+ "
    assert re.fullmatch(line + r"\([\d.]+ s\)", lines[2])


def test_more_metrics_than_fit_take_further_lines(make_trainer, monkeypatch):
    terminal = Terminal(60)
    metrics = {f"val/metric_{number}": 0.0125 for number in range(8)}
    with console(terminal.stream):
        monkeypatch.setattr("regimen.trainer.evaluation.evaluate", lambda *args, **more: metrics)
        make_trainer({"progress": Progress()}, max_epochs=1, log_every_n_steps=1).fit()
    lines = [row for row in terminal.rows() if row]
    assert max(map(len, [*lines, *terminal.frames()])) <= 60
    half = len(lines) // 2
    names = " ".join(lines[:half]).split()
    assert names == ["epoch", "step", "time", "best", "train/epoch_loss", *metrics]
    for above, below in zip(lines[:half], lines[half:], strict=True):  # each below its name
        ends = [match.end() for match in re.finditer(r"0\.0125", below)]
        assert all(above[end - 1] != " " and above[end : end + 1] in ("", " ") for end in ends)


def test_a_task_with_turns_tells_the_loss_of_each():
    task = SimpleNamespace(turns=["told", "made"])
    trainer = SimpleNamespace(task=task)
    assert losses_of(trainer, "train/loss") == ["train/loss_told", "train/loss_made"]
    task.turns = ()
    assert losses_of(trainer, "train/loss") == ["train/loss"]


@pytest.mark.parametrize("place", ["logged", "printed", "dumb", "unknown", "notebook"])
def test_a_line_closes_an_epoch_elsewhere_and_where_no_cursor_moves(
    make_trainer, monkeypatch, capsys, place
):
    terminal = Terminal() if place not in ("logged", "printed") else None
    if place == "notebook":
        monkeypatch.setitem(sys.modules, "ipykernel", SimpleNamespace())
    elif terminal:
        monkeypatch.setenv("TERM", place)
    with console(terminal.stream if terminal else None, logged=place != "printed"):
        make_trainer({"progress": Progress(bar=terminal and True)}).fit()
    text = terminal.text() if terminal else capsys.readouterr().err
    lines = [line.split(":")[0] for line in text.splitlines()]
    assert lines == ["epoch 1/2, step 5", "epoch 2/2, step 10"]
    assert "\x1b" not in text


def test_now_and_then_a_line_within_an_epoch_or_a_long_validation(
    make_trainer, capsys, monkeypatch
):
    clock = iter(range(0, 1000, 10))  # each look at the clock: 10 s later
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    with console():
        progress = Progress(every_seconds=25)
        make_trainer({"progress": progress}, log_every_n_steps=1).fit()
        progress = Progress(every_seconds=10)
        make_trainer({"progress": progress}, max_epochs=1).fit()
    lines = capsys.readouterr().err.splitlines()
    within = [line for line in lines if "left" in line]
    # At 0 s the run begins, at 10 s the epoch; the looks at steps 1 to 3 are at 20, 30 and 40, and
    # the rate is that at 50 s: the run has 117 s to go, its second epoch included.
    line = r"epoch 1/2, step 3/10: train/loss [\d.]+ \(16\.67s/step, 01:56 left\)"
    assert re.fullmatch(line, within[0])
    assert "epoch 1/1: val 1/2 batches" in lines


def test_a_resumed_epoch_begins_where_it_was_and_the_best_before_it_counts(
    make_trainer, tmp_path, carry_over
):
    terminal, callbacks = Terminal(), {"progress": Progress(), "judge": Judge(before=0.0)}
    first, second = make_trainer({"stop": StopAt(3)}), make_trainer(callbacks, tmp_path)
    first.fit()
    carry_over(first, second)
    with console(terminal.stream):
        second.fit()
    bars = [frame for frame in terminal.frames() if "|" in frame]
    assert re.search(r"run: +30%\|.*\| 3/10", bars[0])
    assert re.search(r"epoch 1/2: +60%\|.*\| 3/5", bars[1])
    assert "*" not in terminal.text()


def test_a_validation_is_told_once_where_it_happened(make_trainer, capsys):
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
    with console():
        make_trainer({"progress": Progress()}, max_epochs=None, max_steps=7).fit()
    assert "epoch 2, step 7: train/epoch_loss" in capsys.readouterr().err
