"""Files that are whole or absent, logs that survive kills and full disks, tables that fit."""

import contextlib
import errno
import io
import json
import logging
import multiprocessing
import os
import resource
import signal
import stat

import pytest

from regimen.trainer.errors import StorageError
from regimen.trainer.files import atomic
from regimen.trainer.files.atomic import AppendLog, write_text
from regimen.trainer.files.layout import (
    encodable,
    format_table,
    terminal_size,
    terminal_width,
    wrap_items,
)
from toy_runs import in_a_child


def names(folder):
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("error", [None, ValueError("x"), KeyboardInterrupt()])
def test_the_old_content_stays_until_the_new_is_whole(tmp_path, error):
    path = tmp_path / ("x" * 240 + ".pt")
    atomic.write_text(path, "old")
    with contextlib.suppress(ValueError, KeyboardInterrupt), atomic.replacing(path) as file:
        file.write(b"new")
        file.flush()
        assert path.read_text() == "old"
        assert list(tmp_path.glob("*.pt")) == [path]  # half a file has no suffix
        if error is not None:
            raise error

    expected = "new" if error is None else "old"

    assert path.read_text() == expected
    assert names(tmp_path) == [path.name]


def die_while_writing(path):
    with atomic.replacing(path) as file:
        file.write(b"half")
        file.flush()
        os.kill(os.getpid(), signal.SIGKILL)


def test_remains_of_a_killed_writer_are_removed(tmp_path):
    path = tmp_path / "a.txt"
    atomic.write_text(path, "old")
    assert in_a_child(die_while_writing, path) == -signal.SIGKILL
    assert len(names(tmp_path)) == 2

    atomic.remove_orphans(tmp_path)
    assert names(tmp_path) == ["a.txt"]
    assert path.read_text() == "old"


def test_the_umask_of_the_user_holds(tmp_path):
    text = tmp_path / "a.txt"
    log = tmp_path / "b.txt"
    old = os.umask(0o077)
    try:
        atomic.write_text(text, "old")
        atomic.AppendLog(log).close()
    finally:
        os.umask(old)

    assert stat.S_IMODE(text.stat().st_mode) == 0o600
    assert stat.S_IMODE(log.stat().st_mode) == 0o600


def leave_with_3_if_none_is(file):
    """End this process with 3 if it has not the file open, else with 0."""
    numbers = os.listdir("/proc/self/fd")
    mine = [os.path.realpath(f"/proc/self/fd/{number}") for number in numbers]
    os._exit(0 if str(file) in mine else 3)


def test_a_forked_process_has_no_part_in_what_is_being_written(tmp_path):
    """It would hold the space of a file that is removed, and its lock, for as long as it lives."""
    with atomic.replacing(tmp_path / "a.pt") as file:
        file.write(b"half")
        (temporary,) = tmp_path.iterdir()
        assert in_a_child(leave_with_3_if_none_is, temporary) == 3
        file.write(b" and half")
    assert (tmp_path / "a.pt").read_text() == "half and half"


@pytest.mark.parametrize(
    ("number", "reason"),
    [
        pytest.param(errno.ENOSPC, "no space left on device", id="full"),
        pytest.param(errno.EIO, "input/output error", id="io"),
        pytest.param(errno.EACCES, "permission denied", id="permission"),
    ],
)
def test_what_failed_is_said_in_one_line(tmp_path, monkeypatch, number, reason):
    def fail(*_):
        raise OSError(number, os.strerror(number))

    path = tmp_path / "a.txt"
    monkeypatch.setattr(os, "fsync", fail)

    with pytest.raises(StorageError, match=f"^cannot write {path}: {reason}$") as caught:
        atomic.write_text(path, "x")
    assert caught.value.exit_code == 7
    assert names(tmp_path) == []


def test_a_folder_that_is_missing_is_said(tmp_path):
    path = tmp_path / "no" / "a.txt"
    with pytest.raises(StorageError, match=f"{path}: no such file"):
        atomic.write_text(path, "x")
    with pytest.raises(StorageError, match=f"{path}: no such file"):
        atomic.AppendLog(path)


def test_json_has_no_nan_and_no_infinity(tmp_path):
    value = {
        "a": float("nan"),
        "b": [1.5, float("inf"), (-float("inf"), True)],
        "c": "NaN",
    }
    atomic.write_json(tmp_path / "a.json", value)
    found = json.loads((tmp_path / "a.json").read_text(), parse_constant=pytest.fail)
    assert found == {"a": None, "b": [1.5, None, [None, True]], "c": "NaN"}


def test_a_further_name_is_replaced_in_one_step(tmp_path):
    first = tmp_path / "1"
    second = tmp_path / "2"
    last = tmp_path / "last"
    for path in (first, second):
        atomic.write_text(path, path.name)
    for path in (first, second, second):
        atomic.link_or_copy(path, last)

    with pytest.raises(StorageError, match="last"):
        atomic.link_or_copy(tmp_path / "gone", last)
    assert last.samefile(second)
    assert names(tmp_path) == ["1", "2", "last"]


@pytest.mark.parametrize(
    ("content", "kept"),
    [
        pytest.param(b"a\nb\n", b"a\nb\n", id="whole"),
        pytest.param(b'a\n{"step": 3, "tra', b"a\n", id="torn"),
        pytest.param(b"torn", b"", id="only-torn"),
        pytest.param(b"a\n" + b"x" * 200_000, b"a\n", id="long-torn"),
        pytest.param(b"x" * 70_000 + b"\n" + b"y" * 70_000, b"x" * 70_000 + b"\n", id="long"),
    ],
)
def test_a_torn_last_line_is_cut(tmp_path, content, kept):
    path = tmp_path / "log"
    path.write_bytes(content)
    log = atomic.AppendLog(path)

    assert log.offset() == len(kept)

    log.write("next")
    assert path.read_bytes() == kept + b"next\n"


def fill_up(path, messages):
    """Write to a log beyond what the disk takes, and again when there is room."""
    log = atomic.AppendLog(path)
    log.write("a" * 50)
    atomic._log.warning = lambda text, *values: messages.put(text % values)

    resource.setrlimit(resource.RLIMIT_FSIZE, (100, resource.RLIM_INFINITY))
    for _ in range(5):
        log.write("b" * 80)
    assert log.offset() == 51

    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    log.write("c")


def test_a_full_disk_is_one_warning_and_no_torn_line(tmp_path):
    path = tmp_path / "log"
    messages = multiprocessing.get_context("fork").SimpleQueue()

    assert in_a_child(fill_up, path, messages) == 0
    assert path.read_text() == "a" * 50 + "\nc\n"
    assert f"cannot write {path}: file too large" in messages.get()
    assert messages.empty()


def test_what_a_resumed_run_writes_follows_its_checkpoint(tmp_path):
    path = tmp_path / "log"
    log = atomic.AppendLog(path)
    log.write("one")
    offset = log.offset()
    log.write("zwölf\n")
    for _ in range(2):
        log.close()

    log = atomic.AppendLog(path)
    log.truncate(offset)
    log.write("TWO")

    assert path.read_text() == "one\nTWO\n"


def test_a_log_that_is_removed_is_told_at_the_next_resume(tmp_path, caplog):
    folder = tmp_path / "run"
    folder.mkdir()
    log = atomic.AppendLog(folder / "log")
    log.write("one")
    (folder / "log").unlink()
    folder.rmdir()

    log.write("nobody reads it, and the run goes on")

    assert not caplog.records

    log.truncate(137)
    assert "lost 96 bytes" in caplog.text


@pytest.mark.parametrize(
    ("text", "content"),
    [
        pytest.param("größe", "größe".encode(), id="letters"),
        pytest.param("a\udcff", b"a\xff", id="a byte of a file's name"),
        pytest.param("a\ud800", b"a\\ud800", id="half a character"),
        pytest.param("\udcff\udbff", b"\\udcff\\udbff", id="both"),
    ],
)
def test_any_text_can_be_written(tmp_path, text, content):
    file = tmp_path / "a"
    write_text(file, text)
    assert file.read_bytes() == content

    path = tmp_path / "log"
    log = AppendLog(path)
    log.write(text)
    log.close()

    assert path.read_bytes() == content + b"\n"
    assert encodable(text).encode()


def test_a_log_is_opened_where_it_is_or_not_at_all(tmp_path):
    victim = tmp_path / "victim"
    victim.write_text("torn")
    link = tmp_path / "log"
    link.symlink_to(victim)
    known = list(logging._handlerList)

    with pytest.raises(StorageError, match="symbolic links"):
        atomic.LogFileHandler(link)
    with pytest.raises(StorageError, match="no such file"):
        atomic.LogFileHandler(tmp_path / "no" / "log")
    assert logging._handlerList == known  # at exit there is none to be closed
    assert victim.read_text() == "torn"


def test_a_log_holds_lines_with_their_level(tmp_path):
    path = tmp_path / "train.log"
    handler = atomic.LogFileHandler(path)
    logger = logging.getLogger("test.log_file")
    logger.addHandler(handler)
    logger.warning("grüße %d", 3)
    logger.removeHandler(handler)
    handler.close()

    text = path.read_text(encoding="utf-8")

    assert text.endswith(" WARNING grüße 3\n")


def test_an_item_longer_than_a_line_has_its_own():
    long = "b" * 20
    assert wrap_items(["a", long, "c", "d"], 10, ", ") == ["a", long, "c, d"]


def test_a_file_has_no_width():
    file = io.StringIO()
    assert terminal_width(file) is None
    assert terminal_size(file) == (80, 24)


def test_a_table_with_room_has_one_line_a_row():
    assert format_table([["job", "lr"], ["0", "0.01"]], 80) == ["job  lr", "0    0.01"]


@pytest.mark.parametrize("columns", [1, 4, 40])
@pytest.mark.parametrize("width", [60, 80, 120, 200])
def test_a_table_fits_and_no_cell_is_cut(columns, width):
    value = "value" * 9
    names = [f"{'key' * 5}{i}" for i in range(columns)]
    values = [value] * columns
    rows = [
        ["job", "status", *names, "val/accuracy", "seconds"],
        ["0", "finished", *values, "0.1234", "10.1"],
        ["1", "finished", *values, "0.1234", "10.1"],
    ]

    lines = format_table(rows, width, last=2)

    for line in lines:
        assert len(line) <= width

    header, first, second = [line.split() for line in lines if not line.startswith(" ")]
    assert header[0] == "job"
    assert first[0] == "0"
    assert second[0] == "1"
    assert first[-2:] == ["0.1234", "10.1"]
    assert second[-2:] == ["0.1234", "10.1"]

    words = " ".join(lines).replace(",", " ").split()
    assert words.count(value) == 2 * columns
    assert set(names) <= set(words)
