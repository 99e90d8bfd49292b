"""Token classification: a label for each word of a text."""

import re
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn

from regimen.data.batch import IGNORED
from regimen.trainer.errors import ModelError
from regimen.trainer.tasks.losses import Loss
from regimen.trainer.tasks.metrics import Running
from regimen.trainer.tasks.supervised import Metrics
from regimen.trainer.tasks.token_task import TokenTask

# What seqeval takes: no entity; or a beginning, inside, end or single word, and the entity's kind.
_TAG = re.compile(r"O|[BIES]-.+", re.DOTALL)


class TokenClassification(TokenTask):
    """Predict a label at each place; batches are `{"input_ids", ..., "labels"}` [n, length].

    The label is -100 where a token does not count: a word has its label at its first token. The
    loss is the mean over the labelled words of an update, however it is split. The model's output
    has shape [n, length, classes]. Batches `(inputs, labels)` are taken as well.

    Reports `token_accuracy`, and with `entities` the `f1` over the entities that tags in B-, I- and
    O mark. `classes`: the names of the tags; None: those of the data set.
    """

    output_kind = "tags"

    def __init__(
        self,
        num_classes: int,
        loss: Loss | None = None,
        entities: bool = True,
        classes: Sequence[str] | None = None,
        metrics: Metrics | None = None,
    ) -> None:
        own = {"f1": EntityF1(classes)} if entities else {}
        super().__init__(loss or nn.CrossEntropyLoss(), metrics, ignore_index=IGNORED, **own)
        self.num_classes = num_classes
        self._entities = entities

    def monitor(self) -> str:
        """Return the metric that the best checkpoint is chosen by."""
        return "f1" if self._entities else "token_accuracy"

    def interpret(self, output: Tensor) -> Tensor:
        """Return the predicted class at each place [n, length]."""
        return output.argmax(1)

    def update_metrics(self, output: Any, target: Any) -> None:
        """Add a batch to the metrics; entities are counted by the labels that are not ignored."""
        super().update_metrics(output, self.labels_of(target))


class EntityF1(Running):
    """F1 over the entities of all sentences, as seqeval counts them.

    Of a sentence those places count whose label is 0 or more. An entity is predicted correctly if
    its words and its kind are those of the labels. `classes`: the tags by their numbers; None:
    `name_classes` gives them. Raises ModelError without the package seqeval.
    """

    higher_is_better = True

    def __init__(self, classes: Sequence[str] | None = None) -> None:
        super().__init__(3)  # entities: correct, predicted, labelled
        if find_spec("seqeval") is None:
            raise ModelError(
                "task.entities",
                "f1 over entities needs the package seqeval",
                "pip install 'torch-regimen[entities]', or task.entities=false",
            )
        self._classes: list[str] = []
        self._is_open = classes is None
        self._batches = list[tuple[Tensor, Tensor]]()  # predicted and labelled classes [n, length]
        if classes is not None:
            self._set_classes(classes)

    def name_classes(self, classes: Sequence[str]) -> None:
        """Take the names of a data set's classes, unless `classes` were given."""
        if self._is_open and classes:
            self._set_classes(classes)

    def reset(self) -> None:
        """Reset the sums to zero."""
        super().reset()
        self._batches = []

    def update(self, output: Tensor, target: Tensor) -> None:
        """Add logits [n, classes, length] and labels [n, length]; nothing waits for the device."""
        self._batches.append((output.detach().argmax(1), target))

    def merge(self, reduce: Callable[[Tensor], Tensor]) -> None:
        """Replace the sums by those over all processes."""
        self._count()
        # Collective: each process has counted its own sentences.
        super().merge(reduce)

    def compute(self) -> float:
        """Return 2 correct / (predicted + labelled); 0 without any entity, as seqeval does."""
        self._count()
        # Waits for the device: an evaluation is over.
        correct, predicted, labelled = self.total.tolist()
        if not predicted + labelled:
            return 0.0
        return float(2 * correct / (predicted + labelled))

    def _set_classes(self, classes: Sequence[str]) -> None:
        wrong = [name for name in classes if not _TAG.fullmatch(name)]
        if wrong:
            raise ModelError(
                "task.entities",
                f"is true, and the tags {', '.join(map(repr, wrong[:5]))} mark no entities, as "
                "B-KIND, I-KIND and O do",
                "set task.entities=false",
            )
        self._classes = [*classes]

    def _count(self) -> None:
        """Count the entities of the batches so far. Waits for the device."""
        from seqeval.metrics.sequence_labeling import (  # type: ignore[import-untyped]
            get_entities,
        )

        if self._batches and not self._classes:
            raise ModelError("task.classes", "is null, and the data have no names of tags")
        for predicted, labels in self._batches:
            for row, truth in zip(predicted.cpu(), labels.cpu(), strict=True):
                counts = truth >= 0
                found = {*get_entities(self._tags(row[counts]))}
                true = {*get_entities(self._tags(truth[counts]))}
                sums = [len(found & true), len(found), len(true)]
                self.total += torch.tensor(sums, dtype=self.total.dtype).to(self.total.device)
        self._batches = []

    def _tags(self, numbers: Tensor) -> list[str]:
        return [self._classes[number] for number in numbers.tolist()]
