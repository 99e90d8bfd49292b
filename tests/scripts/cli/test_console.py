"""Which exit code a failure has, and what is said of it."""

import pytest
import torch

from scripts.cli.console import describe, exit_code


def host() -> None:
    torch.empty(2**60, dtype=torch.uint8)


def device() -> None:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.\nSee docs")


def python() -> None:
    raise MemoryError


@pytest.mark.parametrize("allocate", [host, device, python])
def test_memory_that_gives_out_names_the_keys_to_turn(allocate) -> None:
    with pytest.raises((RuntimeError, MemoryError)) as caught:
        allocate()
    assert exit_code(caught.value) == 8
    text = describe(caught.value)
    assert "trainer.gradient_accumulation_steps" in text
    assert "\n" not in text


def test_an_unexpected_exception_is_one_line() -> None:
    error = ValueError("first\nsecond")
    assert (exit_code(error), describe(error)) == (1, "ValueError: first")
