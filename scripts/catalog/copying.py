"""Write new files, never over one that exists."""

from pathlib import Path

from conf.errors import ConfigError, Problem
from trainer.files.storage import storage_error


def write_new(path: Path, text: str) -> None:
    """Write `text` to the new file `path`, making missing folders.

    Raises ConfigError where it exists, StorageError.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError as error:
        message = f"{error.filename} exists: choose another name"
        raise ConfigError(Problem("", message)) from None
    except OSError as error:
        raise storage_error(path, error) from error


def shown_use(path: Path, source: str) -> list[str]:
    """Return the command that picks the copy `path` of `group/choice`.

    Empty if the path does not end with the folders of the group.
    """
    group = source.strip("/").rpartition("/")[0]
    depth = group.count("/") + 1
    folders = path.absolute().parent.parts
    if "/".join(folders[-depth:]) != group:
        return []
    root = path.absolute().parents[depth]
    here = Path.cwd()
    shown = root.relative_to(here) if root.is_relative_to(here) else root
    return ["train", "--config-dir", str(shown), f"{group}={path.stem}"]
