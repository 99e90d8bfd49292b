"""Language modelling on batches of named tensors, as transformers and its collators make them."""

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from regimen.data.batch import IGNORED
from regimen.trainer.errors import ModelError, SampleError, describe_value, qualified_name
from regimen.trainer.task import StepOutput
from regimen.trainer.tasks.chunked_loss import ChunkedLoss
from regimen.trainer.tasks.generation import Generator
from regimen.trainer.tasks.language_model import LanguageModel
from regimen.trainer.tasks.losses import Loss
from regimen.trainer.tasks.supervised import Metrics
from regimen.trainer.tasks.trials import check_rows, parts_of


class Chat(LanguageModel):
    """Predict the next token; batches are `{"input_ids", ..., "labels"}`, of shape [n, length].

    `labels` are the tokens themselves, not shifted, and -100 where one is not learnt. The loss is
    the mean over the learnt tokens of the whole update, however it is split. The model is called
    with all other tensors by name, and returns logits [n, length, vocabulary] or an object with
    `logits`. Reports `token_accuracy` and `perplexity`.

    chunked_loss: compute the training loss without keeping the logits, for models of transformers;
        training then reports no `token_accuracy`. An evaluation computes logits all the same.
    generate, tokenizer: those of `regimen.trainer.tasks.generation.Generator`. With them an
    evaluation answers the questions of a batch (`prompts`), and metrics that take texts compare
    each answer with its reference.
    """

    output_kind = "array"

    def __init__(
        self,
        loss: Loss | None = None,
        metrics: Metrics | None = None,
        chunked_loss: bool = False,
        generate: Mapping[str, Any] | None = None,
        tokenizer: Any = None,
    ) -> None:
        loss = loss or nn.CrossEntropyLoss()
        self.generator = None if generate is None else Generator(generate, tokenizer)
        self.writes_texts = self.generator is not None
        super().__init__(0, loss, IGNORED, metrics)
        self._chunked = ChunkedLoss(loss) if chunked_loss else None
        self.num_classes = None  # that of the model, which may be more than the tokenizer's tokens

    def training_step(self, model: nn.Module, batch: Any) -> StepOutput:
        """Compute loss and scores of a batch; of a chunked loss nothing but the loss."""
        if self._chunked is not None:
            inputs, target = _inputs_and_targets(batch)
            counts = self.losses.counts(target)
            total = self._chunked(model, inputs, target)
            # A micro-batch without a label has the loss 0.
            mean = total / torch.as_tensor(counts[""]).clamp(min=1)
            return StepOutput({"": mean}, counts)
        return super().training_step(model, _inputs_and_targets(batch))

    def evaluation_step(self, model: nn.Module, batch: Any) -> StepOutput:
        """Compute loss, scores and metrics of a batch; answer its questions."""
        result = super().evaluation_step(model, _inputs_and_targets(batch))
        if self.generator is not None:
            answered = self.generator.answers(model, _prompts(batch))
            self.update_text_metrics(
                [one.answer for one in answered], [one.reference for one in answered]
            )
            result.output = answered
        return result

    def counts(self, batch: Any) -> Mapping[str, Tensor | int]:
        """Return the number of tokens that are learnt."""
        return super().counts(_inputs_and_targets(batch))

    def prediction_step(self, model: nn.Module, batch: Any) -> Any:
        """Return the logits [n, length, vocabulary]; labels are not needed.

        Of a batch that holds nothing but questions, one a sample: the tokens of the answers
        [n, max_new_tokens], -100 after their end.
        """
        if self.generator is not None and "input_ids" not in batch:
            prompts = _prompts(batch)
            return self.generator.tokens(
                model,
                {
                    "tokens": prompts["tokens"][:, 0],
                    "lengths": prompts["lengths"][:, 0].clamp(min=1),
                    "ends": prompts["ends"][0],
                },
            )
        return _logits(model, _inputs(batch))

    def answer(self, model: nn.Module, inputs: Any) -> Any:
        """Return logits [n, vocabulary, length]: torch's losses expect classes in dimension 1."""
        return _logits(model, inputs).transpose(1, 2)

    def check(self, output: Any, target: Any) -> None:
        """Accept any number of logits: that of the labels' tokens or more."""

    def check_training(self, model: nn.Module, dataset: Any) -> None:
        """Raise ModelError for a model that lets the documents of a row see each other."""
        for part in parts_of(dataset):
            if hasattr(part, "is_packed"):
                first = part[0]["input_ids"]
                check_rows(model, partial(_logits, model), first, part.is_packed)

    def check_evaluation(self, model: nn.Module, datasets: Mapping[str, Any]) -> None:
        """Raise ModelError for a model that cannot answer, and for data without questions."""
        if self.generator is None:
            return
        self.generator.check(model)
        for name, dataset in datasets.items():
            longest = getattr(dataset, "longest_prompt", None)
            if longest is None:
                raise ModelError(
                    "task.generate",
                    f"{name} is a {type(dataset).__name__}, which has no prompts to answer",
                    "take data=chat, or set task.generate=null",
                )
            self.generator.check(model, longest)
            _ = self.generator.tokenizer  # cannot be loaded: found out before the run


def _inputs(batch: Any) -> dict[str, Any]:
    """Return what the model is given of a batch. Raises SampleError."""
    if not isinstance(batch, Mapping) or "input_ids" not in batch:
        raise SampleError(
            f"the data set returned samples that make a batch {describe_value(batch)}, and "
            "task=chat takes a dict with input_ids and labels: take data=chat, or a collate_fn of "
            "transformers"
        )
    return {name: value for name, value in batch.items() if name not in ("labels", "prompts")}


def _inputs_and_targets(batch: Any) -> tuple[dict[str, Any], Tensor]:
    """Return the model's inputs, and the next token of each position: -100 where none is learnt."""
    inputs = _inputs(batch)
    if not isinstance(batch.get("labels"), Tensor):
        raise SampleError("a batch has no labels, a tensor [n, length]: task=chat needs them")
    # The labels are shifted, and not the logits: a part of these would be copied by the loss.
    return inputs, pad(batch["labels"][:, 1:], (0, 1), value=IGNORED)


def _prompts(batch: Any) -> Mapping[str, Tensor]:
    """Return the questions of a batch. Raises SampleError without them."""
    prompts = batch.get("prompts")
    if prompts is None:
        raise SampleError(
            "a batch has no prompts, which task.generate answers: take data=chat, or set "
            "task.generate=null"
        )
    return prompts  # type: ignore[no-any-return]


def _logits(model: nn.Module, inputs: Mapping[str, Any]) -> Tensor:
    """Call the model. Raises ModelError unless it returns logits [n, length, vocabulary]."""
    output = model(**inputs)
    logits = getattr(output, "logits", output)
    if not isinstance(logits, Tensor) or logits.ndim != 3:
        raise ModelError(
            f"{qualified_name(model)} returned {describe_value(output)}, where task=chat takes "
            "logits [n, length, vocabulary]"
        )
    return logits
