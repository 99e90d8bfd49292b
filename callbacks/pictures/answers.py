"""What a language model answers, beside the answers of the data."""

from typing import Any

from regimen.callbacks.pictures.picture import ValidationPicture
from regimen.conf.errors import shortened
from regimen.trainer.tasks.generation import Answered
from regimen.trainer.trainer import Trainer

_COLUMNS = ("prompt", "answer", "reference")
_MOST = 2000  # characters of a cell
# What would end a cell, or be read as Markdown or HTML.
_ESCAPES = str.maketrans(
    {
        "&": "&amp;",
        "<": "&lt;",
        ">": "&gt;",
        "|": "&#124;",
        "\n": "<br>",
        "\r": "",
        **{character: f"\\{character}" for character in "\\`*_["},
    }
)


class AnswerTable(ValidationPicture):
    """Log the answers to the first questions of the validation, as a table `val/answers`.

    They are the first ones of the data set, whatever the batches and processes. Nothing is shown
    of a task that writes no answers (`task.generate`).
    """

    on_main_only = False

    def __init__(self, count: int = 8, every_n_validations: int | None = 1) -> None:
        super().__init__(count, every_n_validations)

    def fits(self, trainer: Trainer) -> bool:
        """Return whether the task answers."""
        return trainer.task.writes_texts

    def collect(self, trainer: Trainer, batch: Any, output: Any) -> None:
        """Keep the answers to the first questions so far."""
        if isinstance(output, list) and all(isinstance(one, Answered) for one in output):
            self.kept = sorted([*self.kept, *output])[: self.wanted]

    def finish(self, trainer: Trainer) -> None:
        """Join what the processes kept, and log the table."""
        answered = list[Answered]()
        # A collective: each process has answered other questions.
        for part in trainer.group.gather_data(self.kept):
            answered += part
        answered = sorted(answered)[: self.wanted]
        if trainer.is_main and answered:
            trainer.log_text("val/answers", _table(answered))


def _table(answered: list[Answered]) -> str:
    """Return a table in Markdown."""
    lines = [_row(_COLUMNS), _row(["---"] * len(_COLUMNS))]
    for one in answered:
        cells = []
        for text in (one.prompt, one.answer, one.reference):
            cells.append(shortened(text, _MOST).translate(_ESCAPES))
        lines.append(_row(cells))
    return "\n".join(lines)


def _row(cells: Any) -> str:
    return f"| {' | '.join(cells)} |"
