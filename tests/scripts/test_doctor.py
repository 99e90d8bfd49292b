"""`regimen doctor`: the checks of a machine and their cures."""

import json
import os
import resource
import shutil
from types import SimpleNamespace

import pytest

from regimen.scripts import doctor as module
from regimen.scripts.doctor import doctor


@pytest.mark.parametrize(
    ("version", "cuda", "works", "text", "cure"),
    [
        pytest.param(None, "13.2", False, "no NVIDIA driver", None, id="none"),
        pytest.param(None, None, True, "the devices below need none", None, id="another's device"),
        pytest.param("570.1", "12.8", True, "NVIDIA driver 570.1", None, id="good"),
        pytest.param("570.1", None, False, "NVIDIA driver 570.1", "CPUs only", id="CPU build"),
        pytest.param("470.1", "13.2", False, "NVIDIA driver 470.1", "CUDA 13.2", id="old"),
    ],
)
def test_the_driver(tmp_path, monkeypatch, version, cuda, works, text, cure):
    command = tmp_path / "nvidia-smi"
    command.write_text(f"#!/bin/sh\n{f'echo {version}' if version else 'exit 9'}\n")
    command.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    found, way_out = module.of_driver(cuda, works)
    assert text in found
    assert (way_out is None) == (cure is None)
    assert cure is None or cure in str(way_out)


@pytest.fixture
def found(monkeypatch, capsys):
    """Return what the command finds on a machine of certain limits."""

    def found(code, threads="1", files=4096, free=9.0):
        monkeypatch.setenv("OMP_NUM_THREADS", threads)
        monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1})
        monkeypatch.setattr(resource, "getrlimit", lambda which: (files, files))
        monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=free * 2**30))
        assert doctor(["--json"]) == code
        return json.loads(capsys.readouterr().out)

    return found


@pytest.mark.parametrize(
    ("machine", "name", "cure"),
    [
        ({"threads": "3"}, "threads", "up to 2"),
        ({"threads": "x"}, "threads", "a number"),
        ({"files": 256}, "open files", "ulimit -n"),
        ({"free": 1.0}, "disk", "another disk"),
    ],
)
def test_each_part_that_is_short_has_a_cure(found, machine, name, cure):
    (bad,) = (part for part in found(8, **machine) if not part["good"])
    assert bad["name"] == name
    assert cure in bad["cure"]


def test_the_command_looks_at_every_part(found):
    parts = found(0, threads="2,1", files=resource.RLIM_INFINITY)
    names = ["versions", "import name", "threads", "open files", "disk", "torch", "driver"]
    names += ["devices"]
    assert [part["name"] for part in parts] == names


def test_a_check_that_fails_is_one_line(monkeypatch, capsys):
    def broken():
        raise OSError("no such\x1b thing")

    checks = [("one", lambda: ("", None)), ("two", broken)]
    monkeypatch.setattr(module, "_checks", lambda: checks)
    assert doctor([]) == 8
    good, bad, end = capsys.readouterr().out.splitlines()
    assert (good.split(), end) == (["good", "one"], "to look at: 1 of 2")
    assert "OSError: no such" in bad
    assert "\x1b" not in bad
