"""Conversations of jsonl files for language models: their tokens, and which of them are learnt."""

import json
import logging
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from regimen.conf.errors import ConfigError, shortened, truncated_list
from regimen.data.errors import DataError, as_data_error
from regimen.data.formats.jsonl import Row, read_rows
from regimen.data.packing import PackedDocuments, TokenizedText
from regimen.data.questions import Question
from regimen.data.splits import Split, part_of_train, source_of_split, split_file
from regimen.data.tokenizers import load_fast_tokenizer, read_template, require_name

logger = logging.getLogger(__name__)
TooLong = Literal["error", "cut", "drop"]
ControlTokens = Literal["error", "keep"]
Message = dict[str, Any]
Span = tuple[int, int]  # characters of a text: the first, and the one after the last

_FORMS = ("messages", "prompt", "text")  # of a row, by the key that only such a row has
_READ = {*_FORMS, "completion", "tools"}  # keys of a line
# Which roles a message may follow; None: it is the first.
_FOLLOWS: Mapping[str, tuple[str | None, ...]] = {
    "system": (None,),
    "developer": (None,),
    "user": (None, "system", "developer", "assistant"),
    "assistant": ("user", "tool"),
    "tool": ("assistant", "tool"),
}
_BLANKS = (" ", "Ġ", "▁")  # as vocabularies write one
_SHOWN = 600  # characters of the first conversation that the plan shows


@dataclass
class Encoder:
    """Turn rows into tokens, and find the learnt ones by the text that the template writes.

    A row is one of three forms: `{"messages": [{"role", "content"}, ...]}`, of which the answers of
    the assistant are learnt but for those with `"learn": false`; `{"prompt", "completion"}`, of
    which the completion is learnt; `{"text"}`, all of which is learnt. The last two end with the
    tokenizer's end token. A prompt and a completion that are lists of messages are a conversation.

    tokenizer: a folder, or a name on the hub.
    template: a file with a chat template to use in place of the tokenizer's.
    variables: further variables of the template.
    control_tokens: of the tokenizer, in the text of a message: "error", or "keep" them. There the
        tokenizer cannot tell them from those that the template writes.
    """

    tokenizer: str
    template: str | None = None
    variables: Mapping[str, Any] = field(default_factory=dict)
    control_tokens: ControlTokens = "error"

    def __post_init__(self) -> None:
        self._tokenizer = load_fast_tokenizer(self.tokenizer, "the learnt ones are found")
        if self.template is not None:
            self._tokenizer.chat_template = read_template(self.template)

        added = self._tokenizer.added_tokens_decoder.values()
        names = [re.escape(token.content) for token in added if token.special]
        self._control = re.compile("|".join(names)) if names else None

    @property
    def vocabulary_size(self) -> int:
        """The largest token plus one."""
        largest: int = max(self._tokenizer.get_vocab().values())
        return 1 + largest

    @cached_property
    def end_tokens(self) -> list[int]:
        """The tokens that end an answer: the tokenizer's, and what the template writes after it."""
        ends = set[int]()
        if self._tokenizer.eos_token_id is not None:
            ends.add(self._tokenizer.eos_token_id)
        added = self._tokenizer.added_tokens_decoder.items()
        special = [number for number, token in added if token.special]
        messages = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "."}]
        # A template may refuse this conversation, for reasons that no conversation of the data has.
        with suppress(DataError, ConfigError):
            document = self._conversation(Row("an answer", {}), messages, range(2))
            learnt = document.tokens[document.is_learnt]
            written = learnt[np.isin(learnt, special)]
            ends.update(written[-1:].tolist())
        return sorted(ends)

    def encode(self, row: Row) -> TokenizedText:
        """Return the tokens of a row. Raises DataError that names the row, and ConfigError."""
        if _form_of(row) == "text":
            return self._text(row, "", _text_of(row, "text"))
        messages, answers = _messages_of(row)
        if messages:
            return self._conversation(row, messages, answers)
        return self._text(row, _text_of(row, "prompt"), _text_of(row, "completion"))

    def question(self, row: Row, context: int) -> Question | None:
        """Return the last learnt answer of a row, and the prompt that asks for it.

        None for a row without one whose prompt has between 1 and `context` - 1 tokens. The prompt
        is encoded without what follows, as it is where nobody knows the answer yet. Raises as
        `encode` does.
        """
        if _form_of(row) == "text":
            return None
        messages, answers = _messages_of(row)
        if not messages:
            prompt = self._prompt(row)
            reference = self._bare_tokens(_text_of(row, "completion"))
            return Question(prompt, reference) if 0 < len(prompt) < context else None
        for number in reversed(answers):
            if not _is_learnt(messages[number]):
                continue
            before = self._render(row, messages[:number], add_generation_prompt=True)
            prompt = self._bare_tokens(before)
            if 0 < len(prompt) < context:
                until = self._render(row, messages[: number + 1])
                reference = self._bare_tokens(until[len(before) :])
                return Question(prompt, reference)
        return None

    def prompt(self, row: Row) -> NDArray[np.int64]:
        """Return the tokens that ask for an answer to a row, which need not hold one.

        An answer at the end of a row is left out. Raises DataError that names the row, and
        ConfigError.
        """
        form = _form_of(row)
        if form == "text":
            raise DataError(f"{row.name}: is a text, which asks for no answer")
        if form == "prompt" and isinstance(row.values["prompt"], str):
            prompt = self._prompt(row)
        else:
            messages = row.values[form]
            _check_messages(row, messages)
            if messages[-1]["role"] == "assistant":
                messages = messages[:-1]
            if messages[-1]["role"] not in _FOLLOWS["assistant"]:
                raise DataError(
                    f"{row.name}: ends with a message of {messages[-1]['role']!r}, to which there "
                    "is no answer"
                )
            self._require_template(row)
            text = self._render(row, messages, add_generation_prompt=True)
            prompt = self._bare_tokens(text)
        if not len(prompt):
            raise DataError(f"{row.name}: its prompt is empty")
        return prompt

    def form(self) -> dict[str, Any]:
        """Return what it is made of, as plain values, for `predict`."""
        template = self.template
        if template is not None:
            template = str(Path(template).expanduser().absolute())
        return {
            "kind": "conversation",
            "tokenizer": self.tokenizer,
            "template": template,
            "variables": dict(self.variables),
        }

    def mark(self, document: TokenizedText) -> str:
        """Return the text of a document with its learnt parts in double angle quotes."""
        changes = np.flatnonzero(np.diff(document.is_learnt)) + 1
        marked = ""
        begin = 0
        for end in (*changes.tolist(), len(document.tokens)):
            part = self._tokenizer.decode(document.tokens[begin:end].tolist())
            marked += f"«{part}»" if document.is_learnt[begin] else part
            begin = end
        text = json.dumps(marked, ensure_ascii=False)[1:-1]  # line breaks as \n
        return shortened(text, _SHOWN)

    def _conversation(self, row: Row, messages: Sequence[Message], answers: range) -> TokenizedText:
        """Encode messages; of the assistant's those are learnt whose number is in `answers`."""
        self._require_template(row)
        if self.control_tokens == "error":
            self._refuse_control_tokens(row, messages)
        text = self._render(row, messages)
        spans = []
        for number in answers:
            if not _is_learnt(messages[number]):
                continue
            before = self._render(row, messages[:number], add_generation_prompt=True)
            until = self._render(row, messages[: number + 1])
            if not (text.startswith(until) and until.startswith(before)):
                raise DataError(
                    f"{row.name}: the chat template of {self.tokenizer} writes message {number + 1}"
                    " or those before it in another way once more messages follow, or without the "
                    "prompt that asks for an answer: the model would be trained on another text "
                    "than it answers to; set data.template=FILE or data.template_variables, or "
                    '"learn": false on all answers but the last'
                )
            self._require_prompt(row, messages[: number + 1], before, until)
            spans.append((len(before), len(until)))
        return self._tokens(text, spans, special=False)

    def _require_prompt(
        self, row: Row, messages: Sequence[Message], before: str, until: str
    ) -> None:
        """Raise DataError if the text of an answer holds what the template should ask for it by.

        before, until: the text up to the last message, and with it.
        """
        answer = messages[-1]
        content = (answer.get("content") or "").strip()
        written = until[len(before) :]
        if not content or content not in written or answer.keys() - {"role", "content", "learn"}:
            return  # reasoning and calls of tools are a part of the answer
        header, _, _ = written.partition(content)
        if not any(map(str.isalnum, header)):
            return
        if before == self._render(row, messages[:-1]):
            raise DataError(
                f"{row.name}: the chat template of {self.tokenizer} begins an answer by "
                f"{header!r:.60}, and does not ask for one by it (add_generation_prompt): the "
                "model would learn to write that; set data.template=FILE"
            )

    def _refuse_control_tokens(self, row: Row, messages: Sequence[Message]) -> None:
        """Raise DataError for a message whose text would end a turn, or begin one."""
        if self._control is None:
            return
        for number, message in enumerate(messages, start=1):
            found = self._control.search(json.dumps(message, ensure_ascii=False))
            if found is not None:
                raise DataError(
                    f"{row.name}: the text of message {number} holds {found[0]!r}, which the "
                    f"tokenizer {self.tokenizer} takes for a control token: take it out, or set "
                    "data.control_tokens=keep"
                )

    def _require_template(self, row: Row) -> None:
        if not self._tokenizer.chat_template:
            raise ConfigError(
                "data.tokenizer",
                f"{self.tokenizer} has no chat template, which {row.name} needs",
                "take the tokenizer of a chat model, or set data.template=FILE",
            )

    def _render(self, row: Row, messages: Sequence[Message], **options: bool) -> str:
        """Return the text that the template makes of messages."""
        bare = [{key: message[key] for key in message if key != "learn"} for message in messages]
        options = {"add_generation_prompt": False, **options}
        # A template may refuse a conversation, by jinja's errors or any of Python's.
        with as_data_error(f"{row.name}: the chat template of {self.tokenizer} fails", Exception):
            return str(
                self._tokenizer.apply_chat_template(
                    bare,
                    tools=row.values.get("tools"),
                    tokenize=False,
                    **{**self.variables, **options},
                )
            )

    def _text(self, row: Row, prompt: str, completion: str) -> TokenizedText:
        """Encode a text, whose second part is learnt, with the end token."""
        end = self._tokenizer.eos_token_id
        if end is None:
            raise ConfigError(
                "data.tokenizer", f"{self.tokenizer} has no end token, which {row.name} needs"
            )
        span = len(prompt), len(prompt) + len(completion)
        document = self._tokens(prompt + completion, [span], special=True)
        if len(document.tokens) and document.tokens[-1] == end:  # the tokenizer's own
            document.is_learnt[-1] = True
            return document
        return TokenizedText(np.append(document.tokens, end), np.append(document.is_learnt, True))

    def _prompt(self, row: Row) -> NDArray[np.int64]:
        """Encode the prompt of a row that is a text, without an end token after it."""
        text = _text_of(row, "prompt")
        tokens = self._tokens(text, [], special=True).tokens
        bare = self._bare_tokens(text)
        end = self._tokenizer.eos_token_id
        ends_itself = bare[-1:].tolist() == [end]  # the text has the end token as its last
        if tokens[-1:].tolist() == [end] and not ends_itself:
            return tokens[:-1]
        return tokens

    def _bare_tokens(self, text: str) -> NDArray[np.int64]:
        """Encode a text without the tokens that a tokenizer puts around one."""
        return self._tokens(text, [], special=False).tokens

    def _tokens(self, text: str, spans: Sequence[Span], special: bool) -> TokenizedText:
        """Encode a text; tokens with a character in one of the spans are learnt."""
        encoded = self._tokenizer(
            text,
            add_special_tokens=special,
            return_offsets_mapping=True,
            truncation=False,
            verbose=False,  # of lengths: `data.context` decides
        )
        tokens = np.array(encoded["input_ids"], dtype=np.int64)
        offsets = np.array(encoded["offset_mapping"], dtype=np.int64).reshape(-1, 2)
        is_learnt = np.zeros(len(tokens), dtype=bool)
        starts = self._starts(tokens, offsets)
        for begin, end in spans:
            # A token that reaches across `begin` is learnt: the blank that an answer starts with
            # may be in one token with the line break before it.
            is_learnt |= (offsets[:, 1] > begin) & (starts < end)
        return TokenizedText(tokens, is_learnt)

    def _starts(self, tokens: NDArray[np.int64], offsets: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the first character of each token [length]; several tokens may share one.

        Byte-level tokenizers may leave the blanks that a token begins with out of its offsets; a
        token of blanks is then empty. Other characters before a token are in none: WordPiece drops
        line breaks.
        """
        starts = offsets[:, 0]
        stops = np.maximum.accumulate(offsets[:, 1])
        previous_stops = np.concatenate([[0], stops[:-1]])
        if not (starts > previous_stops).any():
            return starts
        words = self._tokenizer.convert_ids_to_tokens(tokens.tolist())
        has_blank = np.array([word.startswith(_BLANKS) for word in words])
        return np.where(has_blank, np.minimum(starts, previous_stops), starts)


def chat(
    root: str,
    split: Split,
    tokenizer: str | None,
    context: int = 1024,
    pack: bool = True,
    too_long: TooLong = "error",
    template: str | None = None,
    template_variables: Mapping[str, Any] | None = None,
    control_tokens: ControlTokens = "error",
    val_fraction: float = 0.1,
    split_seed: int = 0,
    fold: int = 0,
    folds: int = 0,
    prompts: bool = False,
) -> PackedDocuments | None:
    """Open one split of `root`: a folder with train, val and test as .jsonl, or a single file.

    Without a file for `val`, a part of train's conversations is taken; with `folds` val is fold
    number `fold` of train. None if there is no such split. Raises DataError, with the file and the
    line of a conversation, and ConfigError.

    too_long: of a conversation with more than `context` tokens: "error", "cut" its end off, or
        "drop" it.
    control_tokens: in the text of a message: "error", or "keep" them.
    prompts: the samples also hold what their conversations ask for (see `PackedDocuments`).
    """
    tokenizer = require_name(tokenizer)
    found = _rows_of(root, split, val_fraction, split_seed, fold, folds)
    if found is None:
        return None
    path, rows = found

    encoder = Encoder(tokenizer, template, template_variables or {}, control_tokens)
    documents = []
    questions = []
    dropped = 0
    for row in rows:
        document = encoder.encode(row)
        length = len(document.tokens)
        if length > context and too_long == "error":
            raise DataError(
                f"{row.name}: {length:,} tokens are more than data.context={context}: set "
                "data.context, or data.too_long=cut or drop"
            )
        if length > context and too_long == "drop":
            dropped += 1
            continue
        document = TokenizedText(document.tokens[:context], document.is_learnt[:context])
        if not document.is_learnt[1:].any():
            where = f"its first {context} tokens" if length > context else "it"
            raise DataError(f"{row.name}: no token of {where} is learnt: take the line out")
        documents.append(document)
        if prompts:
            questions.append(encoder.question(row, context))
    if not documents:
        raise DataError(f"{path}: all {dropped} conversations are longer than {context} tokens")
    if prompts and not any(questions):
        raise DataError(
            f"{path}: no conversation asks for an answer, and task.generate is set: leave it out"
        )
    remarks = [f"first conversation, learnt parts in «»: {encoder.mark(documents[0])}"]
    unread = sorted({key for row in rows for key in row.values} - _READ)
    if unread:
        remarks.append(f"keys of lines that are not read: {truncated_list(unread, 12)}")
    if dropped:
        remarks.append(f"{dropped:,} conversations of more than {context} tokens are left out")
        logger.warning("warning: data.%s: %s (data.too_long=drop)", split, remarks[-1])
    return PackedDocuments(
        documents,
        context,
        pack,
        encoder.vocabulary_size,
        remarks,
        questions if prompts else None,
        encoder.end_tokens if prompts else (),
        encoder.form(),
    )


def _rows_of(
    root: str, split: Split, val_fraction: float, split_seed: int, fold: int, folds: int
) -> tuple[Path, list[Row]] | None:
    """Return the file of a split and its rows. Raises DataError."""
    find = partial(split_file, Path(root).expanduser(), suffixes=(".jsonl",))
    path, is_part = source_of_split(find, split, val_fraction, folds)
    if path is None and split == "train":
        raise DataError(f"data.root={root}: no such file, nor a folder with a train.jsonl")
    if path is None:
        return None
    rows = list(read_rows(path))
    if not rows:
        raise DataError(f"{path}: holds no conversation")
    if is_part:
        rows = part_of_train(split, rows, val_fraction, split_seed, fold, folds)
    return path, rows


def _form_of(row: Row) -> str:
    """Return which of the three forms a row has."""
    forms = [form for form in _FORMS if form in row.values]
    if len(forms) != 1:
        raise DataError(
            f"{row.name}: has {', '.join(map(repr, row.values)) or 'no keys'}: expected "
            '{"messages": [...]}, {"prompt", "completion"} or {"text"}'
        )
    if "completion" in row.values and forms != ["prompt"]:
        raise DataError(
            f"{row.name}: has {forms[0]!r} and 'completion', which belongs to a prompt: leave one "
            "of them out"
        )
    if "learn" in row.values:
        raise DataError(f'{row.name}: "learn" belongs to a message, not to the line')
    return forms[0]


def _messages_of(row: Row) -> tuple[list[Message], range]:
    """Return the messages of a row, and the numbers of those that may be learnt.

    There are none in a row whose prompt is a text.
    """
    if "messages" in row.values:
        messages = row.values["messages"]
        _check_messages(row, messages)
        return messages, range(len(messages))
    prompt = row.values["prompt"]
    completion = row.values.get("completion")
    if not isinstance(prompt, list) or not isinstance(completion, list):
        return [], range(0)
    messages = [*prompt, *completion]
    _check_messages(row, messages)
    return messages, range(len(prompt), len(messages))


def _is_learnt(message: Message) -> bool:
    """Return whether a message is an answer, and learnt."""
    return message["role"] == "assistant" and bool(message.get("learn", True))


def _text_of(row: Row, key: str) -> str:
    value = row.values.get(key)
    if not isinstance(value, str):
        raise DataError(
            f"{row.name}: {key!r} is {type(value).__name__}, not a text (or, of prompt and "
            "completion, both lists of messages)"
        )
    return value


def _check_messages(row: Row, messages: Any) -> None:
    """Raise DataError for messages that are none, or whose roles are out of order."""
    if not isinstance(messages, list) or not messages:
        raise DataError(f"{row.name}: 'messages' is no list of messages")
    previous = None
    for number, message in enumerate(messages, start=1):
        where = f"{row.name}: message {number}"
        if not isinstance(message, dict):
            raise DataError(f"{where} is no object, but a {type(message).__name__}")
        role = message.get("role")
        if not isinstance(role, str) or role not in _FOLLOWS:
            raise DataError(f"{where}: its role is {role!r}, none of {', '.join(_FOLLOWS)}")
        if previous not in _FOLLOWS[role]:
            before = "at the start" if previous is None else f"after {previous!r}"
            raise DataError(f"{where}: its role {role!r} may not stand {before}")
        calls_tools = role == "assistant" and message.get("tool_calls")
        if not isinstance(message.get("content"), str) and not calls_tools:
            raise DataError(f"{where}: its content is no text")
        learn = message.get("learn", role == "assistant")
        if not isinstance(learn, bool):
            raise DataError(f"{where}: its learn is {learn!r}, neither true nor false")
        if learn and role != "assistant":
            raise DataError(f"{where}: only messages of the assistant are learnt, not of {role!r}")
        previous = role
