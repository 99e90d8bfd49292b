"""Files that are whole or absent, and logs that survive kills and full disks."""

import contextlib
import errno
import logging
import multiprocessing
import os
import resource
import signal
import subprocess
import sys
import textwrap

import pytest

from toy_runs import in_a_child
from trainer.errors import StorageError
from trainer.files import atomic
from trainer.files.atomic import (
    AppendLog,
    LogFileHandler,
    link_or_copy,
    remove_orphans,
    replacing,
    write_json,
    write_text,
)


def names(folder):
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("error", [None, ValueError("x"), KeyboardInterrupt()])
def test_the_old_content_stays_until_the_new_is_whole(tmp_path, error):
    path = tmp_path / ("x" * 240 + ".pt")
    write_text(path, "old")
    with contextlib.suppress(ValueError, KeyboardInterrupt), replacing(path) as file:
        file.write(b"new")
        file.flush()
        assert path.read_text() == "old"
        assert list(tmp_path.glob("*.pt")) == [path]  # half a file has no suffix
        if error is not None:
            raise error
    assert path.read_text() == ("old" if error else "new")
    assert names(tmp_path) == [path.name]


def leave_with_3_if_none_is(file):
    mine = [os.path.realpath(f"/proc/self/fd/{number}") for number in os.listdir("/proc/self/fd")]
    os._exit(0 if str(file) in mine else 3)


def test_a_forked_process_has_no_part_in_what_is_being_written(tmp_path):
    """It would hold the space of a file that is removed, and its lock, for as long as it lives."""
    with replacing(tmp_path / "a.pt") as file:
        file.write(b"half")
        (temporary,) = tmp_path.iterdir()
        assert in_a_child(leave_with_3_if_none_is, temporary) == 3
        file.write(b" and half")
    assert (tmp_path / "a.pt").read_text() == "half and half"


def die_while_writing(path):
    with replacing(path) as file:
        file.write(b"half")
        file.flush()
        os.kill(os.getpid(), signal.SIGKILL)


def test_remains_of_a_killed_writer_are_removed(tmp_path):
    path = tmp_path / "a.txt"
    write_text(path, "old")
    assert in_a_child(die_while_writing, path) == -signal.SIGKILL
    assert len(names(tmp_path)) == 2
    remove_orphans(tmp_path)
    assert names(tmp_path) == ["a.txt"]
    assert path.read_text() == "old"


@pytest.mark.parametrize(
    ("number", "reason"),
    [
        pytest.param(errno.ENOSPC, "no space left", id="full"),
        pytest.param(errno.EDQUOT, "disk quota exceeded", id="quota"),
        pytest.param(errno.EIO, "input/output error", id="io"),
        pytest.param(errno.EROFS, "read-only file system", id="read-only"),
        pytest.param(errno.EACCES, "permission denied", id="permission"),
    ],
)
def test_what_failed_is_said_in_one_line(tmp_path, monkeypatch, number, reason):
    def fail(*_):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "fsync", fail)
    path = tmp_path / "a.txt"
    with pytest.raises(StorageError, match=f"^cannot write {path}: {reason}$") as caught:
        write_text(path, "x")
    assert caught.value.exit_code == 7
    assert names(tmp_path) == []
    missing = f"the folder {tmp_path / 'no'} does not exist"
    for write in (lambda path: write_text(path, "x"), AppendLog):
        with pytest.raises(StorageError, match=missing):
            write(tmp_path / "no" / "a.txt")
    with pytest.raises(ValueError, match="JSON"):
        write_json(path, {"a": float("nan")})


def test_the_users_umask_holds(tmp_path):
    old = os.umask(0o077)
    try:
        write_text(tmp_path / "a.txt", "x")
        AppendLog(tmp_path / "b.txt").close()
    finally:
        os.umask(old)
    assert [(tmp_path / name).stat().st_mode & 0o777 for name in ("a.txt", "b.txt")] == [0o600] * 2


def test_a_further_name_is_replaced_in_one_step(tmp_path):
    for name in ("1", "2"):
        write_text(tmp_path / name, name)
    link_or_copy(tmp_path / "1", tmp_path / "last")
    link_or_copy(tmp_path / "2", tmp_path / "last")
    link_or_copy(tmp_path / "2", tmp_path / "last")
    with pytest.raises(StorageError, match="last"):
        link_or_copy(tmp_path / "gone", tmp_path / "last")
    assert (tmp_path / "last").samefile(tmp_path / "2")
    assert names(tmp_path) == ["1", "2", "last"]


@pytest.mark.parametrize(
    ("content", "kept"),
    [
        pytest.param(b"", b"", id="empty"),
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
    log = AppendLog(path)
    assert log.offset() == len(kept)
    log.write("next")
    assert path.read_bytes() == kept + b"next\n"


def test_what_a_resumed_run_writes_follows_its_checkpoint(tmp_path, caplog):
    log = AppendLog(tmp_path / "log")
    log.write("one")
    offset = log.offset()
    log.write("zwölf\n")
    log.close()
    log.close()
    assert (tmp_path / "log").read_text(encoding="utf-8") == "one\nzwölf\n"
    log = AppendLog(tmp_path / "log")
    log.truncate(offset)
    log.write("TWO")
    assert (tmp_path / "log").read_text() == "one\nTWO\n"
    assert not caplog.records
    log.truncate(100)
    assert "lost 92 bytes" in caplog.text
    assert (tmp_path / "log").read_text() == "one\nTWO\n"


def fill_up(path, messages):
    log = AppendLog(path)
    log.write("a" * 50)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, resource.RLIM_INFINITY))
    atomic._log.warning = lambda text, *values: messages.put(text % values)
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


def test_a_deleted_folder_does_not_stop_the_log(tmp_path, caplog):
    folder = tmp_path / "run"
    folder.mkdir()
    log = AppendLog(folder / "log")
    (folder / "log").unlink()
    folder.rmdir()
    log.write("x")
    assert log.offset() == 2
    assert not caplog.records


READ_ONLY = """
    import sys
    from pathlib import Path
    from trainer.files.atomic import AppendLog
    from trainer.files.atomic import write_text
    from trainer.errors import StorageError
    from trainer.runs.directory import RunDirectory

    folder = Path(sys.argv[1])
    for attempt in (
        lambda: write_text(folder / "a", "x"),
        lambda: AppendLog(folder / "a"),
        lambda: RunDirectory.create(folder, config_yaml="", overrides=[], facts={}),
        lambda: RunDirectory.create(folder / "new", config_yaml="", overrides=[], facts={}),
    ):
        try:
            attempt()
        except StorageError as error:
            print(error)
"""


def test_a_read_only_file_system_is_named(tmp_path):
    mounting = ["unshare", "-m", "sh", "-c"]
    if subprocess.run(
        [*mounting, f"mount -t tmpfs none {tmp_path}"], capture_output=True
    ).returncode:
        pytest.skip("mounting a read-only file system needs root, whom modes do not stop")
    command = [*mounting, f'mount -t tmpfs -o ro none {tmp_path} && exec "$@"', "sh"]
    command += [sys.executable, "-c", textwrap.dedent(READ_ONLY), str(tmp_path)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.stderr == ""
    paths = [tmp_path / name for name in ("a", "a", ".lock", "new")]
    expected = [f"cannot write {path}: read-only file system" for path in paths]
    assert result.stdout.splitlines() == expected


def test_a_log_is_opened_through_no_link_and_holds_lines_with_their_level(tmp_path, caplog):
    (tmp_path / "victim").write_text("torn")
    (tmp_path / "log").symlink_to(tmp_path / "victim")
    with pytest.raises(StorageError, match="is a symbolic link"):
        AppendLog(tmp_path / "log")
    assert (tmp_path / "victim").read_text() == "torn"
    handler, logger = LogFileHandler(tmp_path / "train.log"), logging.getLogger("test.log_file")
    logger.addHandler(handler)
    logger.warning("grüße %d", 3)
    logger.removeHandler(handler)
    handler.close()
    assert (tmp_path / "train.log").read_text(encoding="utf-8").endswith(" WARNING grüße 3\n")


def test_a_file_that_cannot_be_opened_is_an_error_at_once_and_no_other_at_exit(tmp_path):
    code = """
        import sys
        from pathlib import Path
        from trainer.errors import StorageError
        from trainer.files.atomic import LogFileHandler
        try:
            LogFileHandler(Path(sys.argv[1]))
        except StorageError as error:
            kept = error  # and with it, by its traceback, the handler
            print(error)
    """
    command = [sys.executable, "-c", textwrap.dedent(code), str(tmp_path / "no" / "train.log")]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert "does not exist" in result.stdout
    assert result.stderr == ""
