"""Labels of which none counts: the loss is then 0, and nothing is trained or measured."""

from __future__ import annotations

import logging

from trainer.errors import SampleError
from trainer.update.sums import Sums

_log = logging.getLogger(__name__)
_CHANGE = (
    "the loss leaves each of them out (its ignore_index, by default -100, or a class weight of 0); "
    "does the data set return the right labels?"
)


class Labels:
    """Warn of labels that are all left out, once for each stage (train, val, test)."""

    def __init__(self) -> None:
        self._told: set[str] = set()

    def look(self, stage: str, sums: Sums, tells: bool) -> None:
        """Look at sums whose means were just taken; no sum is read from a device for it."""
        if sums.without_labels and tells and stage not in self._told:
            self._told.add(stage)
            _log.warning("no label counts in %s/loss, which is 0: %s", stage, _CHANGE)


def refuse_without(sums: Sums, epoch: int) -> None:
    """Raise SampleError where no label of a whole epoch counted: it has trained nothing."""
    if sums.without_labels:
        raise SampleError(f"no label of epoch {epoch} counts: nothing is trained; {_CHANGE}")
