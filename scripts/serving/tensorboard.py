"""`regimen tensorboard --logdir DIR ...`: TensorBoard, with each run under its own name."""

import signal
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from types import FrameType
from typing import NoReturn

from conf.errors import ConfigError, Problem
from scripts.cli.arguments import command_parser
from trainer.errors import EXIT_CODES, stopping_signals
from trainer.runs.dashboard import FOLDER, SESSIONS, SWEEP

_DESCRIPTION = """\
TensorBoard on 127.0.0.1, with each run under its own name, the jobs of a sweep under what varies.

  regimen tensorboard --logdir RUN [RUN ...]   one run, or several to compare
  regimen tensorboard --logdir SWEEP           all jobs, those included that start later
  regimen tensorboard --logdir runs            all runs that are in this folder now

Other options are TensorBoard's own, such as --port 6007 (0: one that is free), --host 0.0.0.0;
`tensorboard --helpfull` lists them.
"""


def tensorboard(argv: Sequence[str]) -> int:
    """Serve until a signal comes; return its exit code, or TensorBoard's. Raises ConfigError."""
    parser = command_parser("regimen tensorboard", _DESCRIPTION)
    parser.add_argument("--logdir", type=Path, nargs="+", metavar="DIR", default=[])
    if {"--help", "-h"} & set(argv):
        parser.print_help()
        return 0
    given, options = parser.parse_known_args(argv)
    with TemporaryDirectory(prefix="regimen-") as empty:
        return _run(named(given.logdir, Path(empty)), options)


def named(folders: Sequence[Path], empty: Path) -> Path:
    """Return the folder that shows runs by their names: one of links, or that of the sweep.

    A folder that is neither a run nor a sweep stands for all of them in it. Raises ConfigError.
    """
    if not folders:
        raise ConfigError(Problem("--logdir", "missing", "give the directory of a run or a sweep"))
    if len(folders) == 1 and (folders[0] / SWEEP).exists():
        return folders[0] / FOLDER
    links: dict[Path, Path] = {}
    for folder in map(Path.absolute, folders):
        found = dict(_shown(folder))
        if not found:
            hint = "give the directory of a run, a sweep, or one that holds some"
            raise ConfigError(Problem("--logdir", f"{folder} holds no {FOLDER}/", hint))
        # Runs of one name, such as copies, have their whole paths.
        links |= {run if name in links else name: run for name, run in found.items()}
    for name, run in links.items():
        place = empty / name.relative_to(name.anchor)
        _link(place, run / FOLDER)
        for session in (run / FOLDER / SESSIONS).glob("*"):  # the Profile tab follows no link
            called = "_".join((*place.relative_to(empty).parts, session.name))
            _link(empty / SESSIONS / called, session)
    return empty


def _link(place: Path, target: Path) -> None:
    place.parent.mkdir(parents=True, exist_ok=True)
    place.symlink_to(target)


def _shown(folder: Path) -> Iterator[tuple[Path, Path]]:
    """Yield names and directories of the runs and sweeps of a folder, or itself."""
    if (folder / FOLDER).is_dir():
        yield Path(*folder.parts[-2:]), folder
        return
    for board in sorted(folder.rglob(FOLDER)):
        if board.is_dir() and not (board.parent.parent / SWEEP).exists():  # the sweep has its jobs
            yield board.parent.relative_to(folder), board.parent


def _run(logdir: Path, options: Sequence[str]) -> int:
    from tensorboard.main import run_main  # type: ignore[import-untyped]

    for number in stopping_signals():
        signal.signal(number, _end)
    sys.argv = ["tensorboard", "--logdir", str(logdir), "--host", "127.0.0.1", *options]
    try:
        run_main()
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    return 0


def _end(number: int, frame: FrameType | None) -> NoReturn:
    raise SystemExit(EXIT_CODES[signal.Signals(number)])
