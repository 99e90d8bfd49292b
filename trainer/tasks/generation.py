"""Answers that a language model writes: greedy, and the same for any batch and process."""

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from regimen.conf.errors import Problem, did_you_mean, raise_problems
from regimen.data.batch import NO_TOKEN
from regimen.data.tokenizers import load_tokenizer
from regimen.trainer.errors import ModelError, qualified_name

_KEY = "task.generate"
_DEFAULTS: Mapping[str, int | None] = {"max_new_tokens": None, "batch_size": 8}
_WITHOUT = "set task.generate=null"


class Answered(NamedTuple):
    """One question: its number in the data set, and the texts."""

    number: int
    prompt: str
    answer: str
    reference: str


class Generator:
    """Answer prompts with a model of transformers; `tokenizer` turns tokens into texts.

    options: `max_new_tokens`, the most tokens of an answer, and `batch_size`, how many prompts are
    computed at a time, always that many: the shapes of all computations, and so the rounding of the
    logits, are the same whichever batches and processes the prompts come in.
    tokenizer: a folder, a name on the hub (no code of it is run), or an object with its methods.
    Raises ModelError for options that are none.
    """

    def __init__(self, options: Mapping[str, Any], tokenizer: Any) -> None:
        raise_problems(_problems(options), ModelError)
        values = {**_DEFAULTS, **options}
        self.max_new_tokens: int = values["max_new_tokens"]
        self._batch_size: int = values["batch_size"]
        if tokenizer is None:
            raise ModelError(
                "task.tokenizer",
                "is null, and task.generate needs one: it writes answers as texts",
                "set task.tokenizer=DIR",
            )
        self._given_tokenizer = tokenizer

    @cached_property
    def tokenizer(self) -> Any:
        """What turns tokens into texts, loaded at its first use. Raises ModelError."""
        given = self._given_tokenizer
        return load_tokenizer(given) if isinstance(given, str) else given

    def check(self, model: nn.Module, longest_prompt: int = 1) -> None:
        """Raise ModelError for a model that generates nothing, or not after prompts so long."""
        config: Any = getattr(_generating(model), "config", None)
        if hasattr(config, "get_text_config"):
            config = config.get_text_config()
        places = getattr(config, "max_position_embeddings", None)
        if places is not None and longest_prompt + self.max_new_tokens > places:
            raise ModelError(
                f"{_KEY}.max_new_tokens",
                f"{self.max_new_tokens} tokens after prompts of up to {longest_prompt} are more "
                f"than the {places} positions of the model",
                "lower it, or data.context",
            )

    def tokens(self, model: nn.Module, prompts: Mapping[str, Tensor]) -> Tensor:
        """Return the tokens of the likeliest answers [n, max_new_tokens], -100 after their end.

        prompts: `tokens` [n, length], each prompt at the right, `lengths` [n], at least 1, and
        `ends` [count], the tokens that end an answer. Waits for the device.
        """
        tokens = prompts["tokens"]
        if not tokens.numel():
            return tokens.new_full((len(tokens), self.max_new_tokens), NO_TOKEN)
        self.check(model, tokens.shape[1])
        answers = []
        for rows in _groups(len(tokens), self._batch_size, tokens.device):
            lengths = prompts["lengths"][rows]
            answers.append(self._group(model, tokens[rows], lengths, prompts["ends"]))
        return torch.cat(answers)[: len(tokens)]

    def answers(self, model: nn.Module, prompts: Mapping[str, Tensor]) -> list[Answered]:
        """Return the answers to a batch's questions, in their order. Waits for the device.

        prompts: the tensors of `regimen.data.questions.Questions`, collated: [n, places, ...].
        """
        asked = prompts["lengths"] > 0
        tokens = prompts["tokens"][asked]
        lengths = prompts["lengths"][asked]
        ends = prompts["ends"][0]
        new = self.tokens(model, {"tokens": tokens, "lengths": lengths, "ends": ends})
        references = _until_end(prompts["references"][asked], ends)
        # Each waits for the device, once for a batch.
        columns = (
            prompts["numbers"][asked].tolist(),
            lengths.tolist(),
            tokens.tolist(),
            new.tolist(),
            references.tolist(),
        )
        answered = []
        for number, length, prompt, answer, reference in zip(*columns, strict=True):
            shown = self.tokenizer.decode(prompt[-length:])
            answered.append(Answered(number, shown, self.text(answer), self.text(reference)))
        return answered

    def text(self, tokens: Sequence[int]) -> str:
        """Return the text of an answer, without control tokens."""
        written = [token for token in tokens if token != NO_TOKEN]
        text: str = self.tokenizer.decode(
            written, skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        return text

    def _group(self, model: nn.Module, tokens: Tensor, lengths: Tensor, ends: Tensor) -> Tensor:
        """Return the tokens of the answers to as many prompts as are computed at a time."""
        from transformers import GenerationConfig

        options: Any = GenerationConfig
        places = torch.arange(tokens.shape[1], device=tokens.device)
        mask = (places >= tokens.shape[1] - lengths[:, None]).long()
        # Waits for the device, once for a group.
        stops = ends.tolist()
        generating = _generating(model)
        own = generating.generation_config
        # That of a published model may ask for sampling, or for penalties: they are not greedy.
        generating.generation_config = options()
        try:
            whole = generating.generate(
                input_ids=tokens,
                attention_mask=mask,
                generation_config=options(
                    max_new_tokens=self.max_new_tokens,
                    do_sample=False,
                    use_cache=True,  # which the forward passes of training do without
                    eos_token_id=stops or None,
                    pad_token_id=stops[0] if stops else 0,
                ),
                # Parameters are whole here, so that no process has to wait for another.
                synced_gpus=False,
            )
        finally:
            generating.generation_config = own
        new = _until_end(whole[:, tokens.shape[1] :], ends)
        missing = self.max_new_tokens - new.shape[1]
        return nn.functional.pad(new, (0, missing), value=NO_TOKEN)


def _until_end(tokens: Tensor, ends: Tensor) -> Tensor:
    """Return tokens [n, length] with -100 from the first end token on."""
    return tokens.masked_fill(torch.isin(tokens, ends).cumsum(1) > 0, NO_TOKEN)


def _groups(count: int, size: int, device: torch.device) -> Iterator[Tensor]:
    """Yield the rows [size] of each group; the last one is filled up with its first row."""
    for start in range(0, count, size):
        rows = torch.arange(start, start + size, device=device)
        yield torch.where(rows < count, rows, start)


def _generating(model: nn.Module) -> Any:
    """Return the part of a wrapped model that generates. Raises ModelError without one."""
    for module in model.modules():
        if callable(getattr(module, "generate", None)) and hasattr(module, "generation_config"):
            return module
    raise ModelError(
        _KEY,
        f"{qualified_name(model)} has no `generate`, as the language models of transformers do",
        f"take model=transformers or model=lora, or {_WITHOUT}",
    )


def _problems(options: Mapping[str, Any]) -> Iterator[Problem]:
    """Yield the options that are not known, missing, or no numbers."""
    if not isinstance(options, Mapping):
        message = f"expected a mapping, got {options!r}"
        yield Problem(_KEY, message, "such as task.generate.max_new_tokens=64")
        return
    for name in options:
        if name not in _DEFAULTS:
            hint = did_you_mean(str(name), _DEFAULTS) or f"there are {', '.join(_DEFAULTS)}"
            yield Problem(f"{_KEY}.{name}", "no such key", hint)
    for name, value in {**_DEFAULTS, **options}.items():
        if name in _DEFAULTS and (type(value) is not int or value < 1):
            yield Problem(f"{_KEY}.{name}", f"expected an integer >= 1, got {value!r}", _WITHOUT)
