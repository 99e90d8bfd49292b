"""The composed configuration of a command line, which is passed to every process of a run."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from conf.yaml_file import dump


@dataclass(frozen=True, slots=True)
class Request:
    """A checked configuration, and the arguments that it was composed from."""

    config: dict[str, Any]  # resolved, plain containers
    overrides: list[str]
    choices: dict[str, str]  # the choice of each config group
    arguments: list[str]  # as typed, for `resume_command`
    allowed: list[str] = field(default_factory=list)  # packages of --allow-target
    prediction: dict[str, Any] | None = None  # the keys of `predict`; None: train
    files: list[str] = field(default_factory=list)  # read by `predict` from standard input

    def resume_command(self, run_dir: Path) -> str:
        """Return the command that resumes this run."""
        kept = [a for a in self.arguments if not a.lstrip("+").startswith(("run_dir=", "resume="))]
        return shlex.join(["train", *kept, run_dir_override(run_dir), "resume=auto"])

    def config_text(self) -> str:
        """Return the configuration as YAML; keys that belong to a single start are null.

        What a sweep does with the run is not part of it.
        """
        stored = {**self.config, "run_dir": None, "resume": None, "dry_run": None, "sweep": None}
        return dump(stored)


def run_dir_override(path: Path) -> str:
    """Return the override that names a folder, quoted where it must be."""
    text = str(path)
    plain = re.fullmatch(r"[\w./+-]+", text)
    return f"run_dir={text if plain else quoted(text)}"


def quoted(text: str) -> str:
    """Quote text for the value of an override: backslashes before a quote are doubled."""
    inner = re.sub(r"(\\*)('|\Z)", lambda m: m[1] * 2 + ("\\'" if m[2] else ""), text)
    return f"'{inner}'"
