"""Write the report of a sweep into its folder."""

from pathlib import Path

from scripts.sweeps.report.gather import Found
from scripts.sweeps.report.importance import importances
from scripts.sweeps.report.importance import why_none as why_no_importance
from scripts.sweeps.report.page import page
from scripts.sweeps.report.pictures import pictures
from scripts.sweeps.report.pictures import why_none as why_no_pictures
from scripts.sweeps.report.tables import as_csv, as_markdown
from trainer.files.atomic import replacing, write_text
from trainer.files.storage import storage_error

PAGE, FOLDER = "report.html", "report"


def write(found: Found) -> tuple[Path, list[str]]:
    """Write page, tables and pictures; return the page's path, and notes on what is missing.

    Raises StorageError.
    """
    folder = found.folder / FOLDER
    try:
        folder.mkdir(exist_ok=True)
    except OSError as error:
        raise storage_error(folder, error) from error
    notes = [note for note in (why_no_pictures(), why_no_importance(found)) if note]
    drawn = {} if why_no_pictures() else pictures(found, importances(found))
    write_text(folder / "leaderboard.csv", as_csv(found))
    write_text(folder / "leaderboard.md", as_markdown(found))
    for name, content in drawn.items():
        with replacing(folder / f"{name}.png") as file:
            file.write(content)
    write_text(found.folder / PAGE, page(found, drawn, notes))
    return found.folder / PAGE, notes
