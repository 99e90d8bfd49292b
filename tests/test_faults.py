"""Every fault that a run must survive or name has a test (tests/faults.yaml)."""

import re
from pathlib import Path

import yaml

TESTS = Path(__file__).parent


def test_each_fault_has_a_test_that_exists():
    rows = yaml.safe_load((TESTS / "faults.yaml").read_text())
    text = "\n".join(path.read_text() for path in TESTS.rglob("test_*.py"))
    there = set(re.findall(r"^def (test_\w+)", text, re.MULTILINE))
    assert {row: set(names) - there for row, names in rows.items() if set(names) - there} == {}
    numbers = {*range(1, 61)} - {9, 16, 26, 31, 42, 50, 51}  # which no row has
    assert {row for row, names in rows.items() if names} == numbers
