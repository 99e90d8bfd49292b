"""What `trainer.compile` may hold: nothing in it names a program, a file or an address."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from conf.errors import Problem, did_you_mean

# Those of torch.compile; tests/conf/test_compile_options.py holds them against it.
MODES = ("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")
_WANTED: Mapping[str, tuple[Callable[[Any], bool], str]] = {
    "mode": (lambda v: v is None or v in MODES, f"one of {', '.join(MODES)}"),
    "dynamic": (lambda v: v is None or isinstance(v, bool), "true, false or null"),
    "fullgraph": (lambda v: isinstance(v, bool), "true or false"),
    "backend": (lambda v: isinstance(v, str), "the name of a backend"),
    "options": (lambda v: v is None or isinstance(v, dict), "names and values"),
}


def compile_problems(given: Mapping[str, Any]) -> Iterator[Problem]:
    """Name the keys of `trainer.compile` that it does not take, and the values.

    Whether a backend of that name is registered, torch says (`trainer/build/check.py`). An option
    that is a text could be the program to compile with (`cpp.cxx`), and a remote cache unpickles
    what it is sent.
    """
    for key, value in given.items():
        if key not in _WANTED:
            hint = did_you_mean(str(key), _WANTED) or f"it takes {', '.join(_WANTED)}"
            yield Problem(f"compile.{key}", "unknown key", hint)
        elif not _WANTED[key][0](value):
            yield Problem(f"compile.{key}", f"expected {_WANTED[key][1]}, got {value!r}")
    options = given.get("options")
    for name, value in options.items() if isinstance(options, dict) else ():
        if not isinstance(value, bool | int | float):
            message = f"only numbers and true or false are taken, got {value!r}"
            yield Problem(f"compile.options.{name}", message)
        elif "remote" in str(name):
            message = "is kept from configurations: it asks other machines"
            yield Problem(f"compile.options.{name}", message)
    if given.get("mode") is not None and options:
        yield Problem("compile.options", "excludes compile.mode: a mode is a set of options")
