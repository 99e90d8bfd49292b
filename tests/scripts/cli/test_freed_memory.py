"""Memory that an update frees stays with the process for the next one."""

import os
import platform
import subprocess
import sys

import pytest

UPDATES = """
import resource
from scripts.cli.console import Command

def update():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    gradients = [bytearray(2**24) for _ in range(8)]
    del gradients
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

with Command():
    print([update() for _ in range(4)][-1])
"""
PAGES = 8 * 2**24 // 4096


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other C libraries cannot be told")
@pytest.mark.parametrize(
    ("environment", "least", "most"),
    [
        pytest.param({}, 0, PAGES // 20, id="kept"),
        pytest.param({"MALLOC_TRIM_THRESHOLD_": "131072"}, PAGES // 2, 2 * PAGES, id="as-asked"),
        pytest.param(
            {"GLIBC_TUNABLES": "glibc.malloc.trim_threshold=131072"},
            PAGES // 2,
            2 * PAGES,
            id="as-tuned",
        ),
    ],
)
def test_pages_are_not_taken_from_the_system_for_every_update(
    environment: dict[str, str], least: int, most: int
) -> None:
    done = subprocess.run(
        [sys.executable, "-c", UPDATES],
        env={k: v for k, v in os.environ.items() if "MALLOC" not in k} | environment,
        capture_output=True,
        text=True,
        check=True,
    )
    assert least <= int(done.stdout) <= most
