"""What `trainer.compile` may hold: nothing in it names a program, a file or an address."""

from collections.abc import Callable, Iterator, Mapping
from difflib import get_close_matches
from typing import Any

# Those of torch.compile; tests/conf/test_compile_options.py holds them against it.
MODES = ("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")
_WANTED: Mapping[str, tuple[Callable[[Any], bool], str]] = {
    "mode": (lambda v: v is None or v in MODES, f"one of {', '.join(MODES)}"),
    "dynamic": (lambda v: v is None or isinstance(v, bool), "true, false or null"),
    "fullgraph": (lambda v: isinstance(v, bool), "true or false"),
    "backend": (lambda v: isinstance(v, str), "the name of a backend"),
    "options": (lambda v: v is None or isinstance(v, dict), "names and values"),
}


def compile_problems(given: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Name the keys of `trainer.compile` that it does not take, and the values.

    Whether a backend of that name is registered, torch says (`trainer/build/check.py`). An option
    that is a text could be the program to compile with (`cpp.cxx`), and a remote cache unpickles
    what it is sent.
    """
    for key, value in given.items():
        if key not in _WANTED:
            near = get_close_matches(str(key), _WANTED, n=1)
            hint = f"did you mean {near[0]}?" if near else f"it takes {', '.join(_WANTED)}"
            yield f"compile.{key}", f"unknown key; {hint}"
        elif not _WANTED[key][0](value):
            yield f"compile.{key}", f"expected {_WANTED[key][1]}, got {value!r}"
    options = given.get("options")
    for name, value in options.items() if isinstance(options, dict) else ():
        if not isinstance(value, bool | int | float):
            message = f"only numbers and true or false are taken, got {value!r}"
            yield f"compile.options.{name}", message
        elif "remote" in str(name):
            yield f"compile.options.{name}", "is kept from configurations: it asks other machines"
    if given.get("mode") is not None and options:
        yield "compile.options", "excludes compile.mode: a mode is a set of options"
