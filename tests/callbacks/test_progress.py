import contextlib
import itertools
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

    def bars(self):
        """Return each progress bar, each time it was written anew."""
        return [frame for frame in self.frames() if "|" in frame]

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
                    row = row + 1
                    column = 0
                rows += [[] for _ in range(row + 1 - len(rows))]
                rows[row] += " " * (column + 1 - len(rows[row]))
                rows[row][column] = sign
                column += 1
            rows += [[] for _ in range(row + 1 - len(rows))]
        return ["".join(row).rstrip() for row in rows]

    def _collect(self):
        with contextlib.suppress(OSError):  # the last writer has closed it
            while True:
                chunk = os.read(self._master, 65536)
                if not chunk:
                    return
                self._read.append(chunk)


@contextlib.contextmanager
def console(stream=None, logged=True):
    """Let stderr be `stream`, and set up logging as the command line does, or not at all."""
    root = logging.getLogger()
    stderr = sys.stderr
    handlers = root.handlers
    level = root.level
    sys.stderr = stream or stderr
    root.handlers = [logging.StreamHandler(sys.stderr)] if logged else []
    root.setLevel(logging.INFO)
    try:
        yield
        for handler in root.handlers:
            assert not handler.filters
    finally:
        sys.stderr = stderr
        root.handlers = handlers
        root.setLevel(level)


def stages(text):
    """Return what stands before the first colon of each line: epoch and step."""
    return [line.partition(":")[0] for line in text.splitlines()]


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


@pytest.fixture
def uneven(make_trainer, tmp_path):
    """Train two epochs, of which the second is validated; return the terminal and the log."""
    terminal = Terminal()
    callbacks = {
        "progress": Progress(),
        "warns": Warns(),
        "judge": Judge(),
    }
    options = {"max_epochs": 2, "validate_every_n_epochs": 2, "log_every_n_steps": 1}
    with console(terminal.stream):
        logging.getLogger().addHandler(logging.FileHandler(tmp_path / "log"))
        make_trainer(callbacks, tmp_path / "run", **options).fit()
    return terminal, tmp_path / "log"


def test_a_terminal_sees_the_run_above_its_epoch(uneven):
    terminal, _ = uneven
    bars = terminal.bars()
    runs = [RUN.fullmatch(bar) for bar in bars]
    runs = [found.groups() for found in runs if found]
    epochs = [EPOCH.fullmatch(bar) for bar in bars]
    epochs = [found.groups() for found in epochs if found]

    assert len(runs) + len(epochs) == len(bars)
    assert runs[0] == ("0", "0/10")
    assert epochs[0][:3] == ("1", "0", "0/5")

    validating = [epoch for epoch in epochs if "validating" in epoch[3]]
    assert ("2", "100") in [epoch[:2] for epoch in validating]
    assert any("train/loss" in epoch[3] for epoch in epochs)
    for bar in bars:
        assert "val/loss" not in bar  # it would be shown as if it were new


def test_a_terminal_has_a_row_for_each_epoch_in_the_end(uneven):
    terminal, _ = uneven
    rows = [row.split() for row in terminal.rows() if row]  # the bars are gone
    warning, first_names, first, names, second = rows
    columns = ["epoch", "step", "time", "best"]

    assert warning == ["something", "happened"]
    assert first_names[:4] == columns
    assert first[:2] == ["1/2", "5"]
    assert "*" not in first
    assert names == [*columns, "train/epoch_loss", "val/accuracy", "val/loss"]  # there are more
    assert second[:2] == ["2/2", "10"]
    assert "*" in second


def test_a_file_has_lines_beside_a_terminal(uneven):
    _, log = uneven
    lines = log.read_text().splitlines()
    number = r"[\d.]+"
    metrics = f"train/epoch_loss {number}, val/accuracy {number}, val/loss {number}"

    assert re.fullmatch(rf"epoch 2/2, step 10: {metrics} \({number} s\)", lines[2])


def test_more_metrics_than_fit_take_further_lines(make_trainer, monkeypatch):
    terminal = Terminal(60)
    metrics = {f"val/metric_{number}": 0.0125 for number in range(8)}
    with console(terminal.stream):
        monkeypatch.setattr("regimen.trainer.evaluation.evaluate", lambda *args, **more: metrics)
        make_trainer({"progress": Progress()}, max_epochs=1, log_every_n_steps=1).fit()

    lines = [row for row in terminal.rows() if row]

    for line in [*lines, *terminal.frames()]:
        assert len(line) <= 60

    half = len(lines) // 2
    names = " ".join(lines[:half]).split()
    assert names == ["epoch", "step", "time", "best", "train/epoch_loss", *metrics]
    for above, below in zip(lines[:half], lines[half:], strict=True):  # each below its name
        for match in re.finditer(r"0\.0125", below):
            end = match.end()
            assert above[end - 1] != " "
            assert above[end : end + 1] in ("", " ")


def test_a_task_with_turns_tells_the_loss_of_each():
    task = SimpleNamespace(turns=["told", "made"])
    trainer = SimpleNamespace(task=task)
    assert losses_of(trainer, "train/loss") == ["train/loss_told", "train/loss_made"]

    task.turns = ()
    assert losses_of(trainer, "train/loss") == ["train/loss"]


LINES = ["epoch 1/2, step 5", "epoch 2/2, step 10"]


@pytest.mark.parametrize("logged", [True, False], ids=["logged", "printed"])
def test_a_line_closes_an_epoch_where_there_is_no_terminal(make_trainer, capsys, logged):
    with console(logged=logged):
        make_trainer({"progress": Progress(bar=None)}).fit()
    text = capsys.readouterr().err
    assert stages(text) == LINES
    assert "\x1b" not in text


@pytest.mark.parametrize("place", ["dumb", "unknown", "notebook"])
def test_a_line_closes_an_epoch_where_no_cursor_moves(make_trainer, monkeypatch, place):
    terminal = Terminal()
    if place == "notebook":
        monkeypatch.setitem(sys.modules, "ipykernel", SimpleNamespace())
    else:
        monkeypatch.setenv("TERM", place)
    with console(terminal.stream):
        make_trainer({"progress": Progress(bar=True)}).fit()
    text = terminal.text()

    assert stages(text) == LINES
    assert "\x1b" not in text


def test_now_and_then_a_line_within_an_epoch_or_a_long_validation(
    make_trainer, capsys, monkeypatch
):
    clock = itertools.count(0, 10)  # each look at the clock: 10 s later
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
    expected = r"epoch 1/2, step 3/10: train/loss [\d.]+ \(16\.67s/step, 01:56 left\)"

    assert re.fullmatch(expected, within[0])
    assert "epoch 1/1: val 1/2 batches" in lines


def test_a_resumed_epoch_begins_where_it_was_and_the_best_before_it_counts(
    make_trainer, tmp_path, carry_over
):
    terminal = Terminal()
    callbacks = {"progress": Progress(), "judge": Judge(before=0.0)}
    first = make_trainer({"stop": StopAt(3)})
    second = make_trainer(callbacks, tmp_path)
    first.fit()
    carry_over(first, second)
    with console(terminal.stream):
        second.fit()

    run, epoch, *_ = terminal.bars()

    assert re.search(r"run: +30%\|.*\| 3/10", run)
    assert re.search(r"epoch 1/2: +60%\|.*\| 3/5", epoch)
    assert "*" not in terminal.text()


def test_a_validation_is_told_once_where_it_happened(make_trainer, capsys):
    rare = {"max_epochs": 3, "validate_every_n_epochs": 2, "validate_every_n_steps": 7}
    with console():
        make_trainer({"progress": Progress()}, **rare).fit()

    told = []
    for line in capsys.readouterr().err.splitlines():
        stage, _, metrics = line.partition(":")
        told.append((stage, "train/" in metrics, "val/loss" in metrics))

    assert told == [
        ("epoch 1/3, step 5", True, False),
        ("epoch 2/3, step 7", False, True),
        ("epoch 2/3, step 10", True, True),
        ("epoch 3/3, step 14", False, True),
        ("epoch 3/3, step 15", True, True),  # the last
    ]


def test_an_epoch_that_is_cut_short_is_told(make_trainer, capsys):
    with console():
        make_trainer({"progress": Progress()}, max_epochs=None, max_steps=7).fit()
    assert "epoch 2, step 7: train/epoch_loss" in capsys.readouterr().err
