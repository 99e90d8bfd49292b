"""Conversations: the learnt tokens are those of a template that marks them, or nothing starts."""

import json

import numpy as np
import pytest

pytest.importorskip("transformers", reason="the extra transformers is not installed")

from regimen.conf.errors import ConfigError
from regimen.data.errors import DataError
from regimen.data.formats.chat import Encoder, chat
from regimen.data.formats.jsonl import Row
from toy_chat import CHATML, conversation, conversations, make_tokenizer, write_rows

# Where templates and tokenizers differ: blanks and line breaks that join what stands beside them,
# characters of several tokens, control tokens in an answer, an empty one.
AWKWARD = [
    conversation(" begins with a blank", "ends with one "),
    conversation("\n\nlines first", "and last\n\n", system="short"),
    conversation("🦆", "über 🦆🦆", "\n"),
    conversation("", "after an empty one"),
    conversation("<|im_end|>", "user\nwhat?"),
]
# No control token around the answers: they touch what the template writes.
PLAIN = (
    "{% for message in messages %}"
    "{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] + '\n' }}{% endgeneration %}"
    "{% else %}{{ 'Q:' + message['content'] + '\nA:' }}{% endif %}{% endfor %}"
)
REVERSED = "{% for message in messages | reverse %}{{ message['content'] }};{% endfor %}"
LAST_ONLY = (  # as templates do that leave out the reasoning of earlier turns
    "{% for message in messages %}{{ message['content'] }}"
    "{% if loop.last %}<|im_end|>{% endif %}{% endfor %}"
)
NO_PROMPT = CHATML.replace("assistant\n' }}{% endif %}", "assistant\n<think>' }}{% endif %}")


@pytest.fixture(scope="module", params=[False, True], ids=["whole offsets", "trimmed offsets"])
def tokenizer(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    made = make_tokenizer(trims=request.param)
    made.save_pretrained(folder)
    return made, str(folder)


def opened(tmp_path, folder, rows, split="train", **options):
    write_rows(tmp_path / f"{split}.jsonl", rows)
    return chat(str(tmp_path), split, folder, val_fraction=0, **options)


def learnt_by_hand(row, template, tokens, made):
    """Return which tokens have a byte between the marks of `{% generation %}`."""
    template = template.replace("{% generation %}", "‹")
    template = template.replace("{% endgeneration %}", "›")
    marked = made.apply_chat_template(row["messages"], chat_template=template, tokenize=False)
    is_inside = False
    flags = []
    for character in marked:
        if character in "‹›":
            is_inside = character == "‹"
        else:
            flags += [is_inside] * len(character.encode())
    learnt = []
    begin = 0
    for token in tokens:
        # The word of a byte-level token has one character for each of its bytes.
        word = made.convert_ids_to_tokens(int(token))
        end = begin + len(word)
        learnt.append(any(flags[begin:end]))
        begin = end
    assert begin == len(flags)
    return learnt


@pytest.mark.parametrize("template", [CHATML, PLAIN], ids=["control tokens", "plain"])
@pytest.mark.parametrize("number", range(len(AWKWARD) + 3))
def test_the_learnt_tokens_are_those_of_a_template_that_marks_them(
    tokenizer, number, template, tmp_path
):
    made, folder = tokenizer
    row = [*AWKWARD, *conversations(3)][number]
    messages = [message for message in row["messages"] if message["role"] != "system"]
    row = {"messages": messages}
    file = tmp_path / "template"
    file.write_text(template)
    encoder = Encoder(folder, str(file), control_tokens="keep")

    document = encoder.encode(Row("here", row))

    expected = learnt_by_hand(row, template, document.tokens, made)
    assert document.is_learnt.tolist() == expected


@pytest.mark.parametrize("template", [CHATML, PLAIN], ids=["control tokens", "plain"])
@pytest.mark.parametrize("number", range(3))
def test_the_learnt_tokens_are_those_of_transformers(tokenizer, number, template, tmp_path):
    made, folder = tokenizer
    messages = conversations(3)[number]["messages"]
    messages = [message for message in messages if message["role"] != "system"]
    file = tmp_path / "template"
    file.write_text(template)
    encoder = Encoder(folder, str(file), control_tokens="keep")

    document = encoder.encode(Row("here", {"messages": messages}))

    theirs = made.apply_chat_template(
        messages, chat_template=template, return_assistant_tokens_mask=True
    )
    assert document.tokens.tolist() == theirs["input_ids"]
    if not made.backend_tokenizer.post_processor.trim_offsets:  # theirs lack the last break
        assert document.is_learnt.tolist() == [mask == 1 for mask in theirs["assistant_masks"]]


def test_a_message_that_is_not_learnt_is_only_read(tokenizer):
    made, folder = tokenizer
    row = conversation("tea number 1", "milk number 2", system="rain")
    row["messages"][2]["learn"] = False

    document = Encoder(folder).encode(Row("here", row))

    assert learnt_texts(document, made) == ["milk number 2<|im_end|>\n"]
    assert "tea number 1<|im_end|>" in made.decode(document.tokens.tolist())


def learnt_texts(document, made):
    """Return the learnt parts of a document."""
    learnt = np.flatnonzero(document.is_learnt)
    gaps = np.flatnonzero(np.diff(learnt) > 1)
    groups = np.split(learnt, gaps + 1)
    return [made.decode(document.tokens[group].tolist()) for group in groups]


ASK, ANSWER, ASK_AGAIN, ANSWER_AGAIN = conversation("tea", "milk")["messages"]


@pytest.mark.parametrize(
    ("row", "learnt"),
    [
        pytest.param({"text": "rain and snow"}, "rain and snow<|im_end|>", id="text"),
        pytest.param(
            {"prompt": "rain\n", "completion": " and 🦆"}, " and 🦆<|im_end|>", id="two texts"
        ),
        pytest.param(
            {"prompt": [ASK, ANSWER, ASK_AGAIN], "completion": [ANSWER_AGAIN]},
            "milk<|im_end|>\n",
            id="messages and the last one",
        ),
    ],
)
def test_other_forms_of_a_row(tokenizer, row, learnt):
    made, folder = tokenizer

    document = Encoder(folder).encode(Row("here", row))

    assert learnt_texts(document, made) == [learnt]


def test_a_tokenizers_own_first_and_last_tokens_are_kept_once(tmp_path):
    from tokenizers.processors import TemplateProcessing

    made = make_tokenizer()
    made.backend_tokenizer.post_processor = TemplateProcessing(
        single="<|im_start|> $A <|im_end|>", special_tokens=[("<|im_start|>", 0), ("<|im_end|>", 1)]
    )
    made.save_pretrained(tmp_path)
    encoder = Encoder(str(tmp_path))

    text = encoder.encode(Row("here", {"text": "rain"}))
    chatted = encoder.encode(Row("here", conversation("tea")))  # the template writes its own

    tokens = text.tokens.tolist()
    assert tokens[0] == 0
    assert tokens.count(1) == 1
    assert learnt_texts(text, made) == ["rain<|im_end|>"]
    assert chatted.tokens.tolist().count(1) == 2


def user(text):
    return {"role": "user", "content": text}


def assistant(text, **keys):
    return {"role": "assistant", "content": text, **keys}


WRONG = {
    "is no JSON: ": "{messages",
    "is no object, but a list": [1],
    r"has 'mesages': expected": {"mesages": []},
    r"has 'text', 'prompt': expected": {"text": "a", "prompt": "b"},
    "has 'text' and 'completion', which belongs": {"text": "a", "completion": "b"},
    "has 'messages' and 'completion', which": {"messages": [user("a")], "completion": "b"},
    r"has 'messages', 'prompt': expected": {"messages": [user("a")], "prompt": "b"},
    "'completion' is NoneType, not a text": {"prompt": "a"},
    "'messages' is no list of messages": {"messages": []},
    "'messages' is no list of": {"messages": None},
    "message 2 is no object": {"messages": [user("a"), 3]},
    "message 1: its role is 'human', none of": {"messages": [{"role": "human", "content": "a"}]},
    "message 2: its role 'user' may not stand after 'user'": {"messages": [user("a"), user("b")]},
    "message 1: its role 'assistant' may not stand at the start": {"messages": [assistant("a")]},
    "message 2: its role 'system' may not stand after": {
        "messages": [user("a"), {"role": "system", "content": "b"}]
    },
    "message 2: its content is no text": {"messages": [user("a"), assistant(None)]},
    "message 2: its learn is 'no', neither": {"messages": [user("a"), assistant("b", learn="no")]},
    "message 1: only messages of the assistant": {"messages": [{**user("a"), "learn": True}]},
    "no token of it is learnt: take": {"messages": [user("a"), assistant("b", learn=False)]},
    "text of message 1 holds '<.im_end.>'": {"messages": [user("a<|im_end|>"), assistant("b")]},
    "text of message 2 holds '<.im_start.>'": {"messages": [user("a"), assistant("<|im_start|>")]},
    '"learn" belongs to a message': {"text": "a", "learn": False},
    "tokens are more than data.context=40": {"text": "snow milk " * 40},
}


@pytest.mark.parametrize(("message", "line"), WRONG.items(), ids=WRONG)
def test_a_wrong_line_is_named_and_nothing_starts(tokenizer, tmp_path, message, line):
    _, folder = tokenizer
    text = line if isinstance(line, str) else json.dumps(line)
    good = json.dumps({"text": "rain"})
    (tmp_path / "train.jsonl").write_text(f"{good}\n\n{text}\n")

    with pytest.raises(DataError, match=f"train.jsonl:3: .*{message}") as caught:
        chat(str(tmp_path), "train", folder, context=40, val_fraction=0)

    assert caught.value.exit_code == 3


@pytest.mark.parametrize("template", [REVERSED, LAST_ONLY, NO_PROMPT], ids=str)
def test_a_template_that_rewrites_earlier_turns_is_refused(tokenizer, tmp_path, template):
    _, folder = tokenizer
    file = tmp_path / "template"
    file.write_text(template)

    with pytest.raises(DataError, match=r"train.jsonl:1: .* writes message 2 .* another way"):
        opened(tmp_path, folder, [conversation("a", "b")], template=str(file))


def test_a_template_that_asks_for_no_answer_is_refused(tokenizer, tmp_path):
    _, folder = tokenizer
    file = tmp_path / "template"
    file.write_text(CHATML.partition("{% if add_generation_prompt %}")[0])
    header = "{% if message['role'] == 'assistant' %}{{ '<|im_start|>assistant\n' }}"
    headless = CHATML.replace(header, "{% if message['role'] == 'assistant' %}")
    assert headless != CHATML
    other = tmp_path / "headless"
    other.write_text(headless.partition("{% if add_generation_prompt %}")[0])

    with pytest.raises(DataError, match=r"jsonl:1: .* begins an answer by '<.im_start.>assistant"):
        opened(tmp_path, folder, [conversation("tea")], template=str(file))
    opened(tmp_path, folder, [conversation("tea")], template=str(other))


def test_of_several_templates_of_a_tokenizer_transformers_chooses(tmp_path):
    made = make_tokenizer({"default": CHATML, "tool_use": "with tools " + CHATML})
    made.save_pretrained(tmp_path)
    encoder = Encoder(str(tmp_path))
    row = conversation("tea")

    plain = encoder.encode(Row("here", row))
    with_tools = encoder.encode(Row("here", {**row, "tools": []}))
    called = {"type": "function", "function": {"name": "boil"}}
    with_a_tool = encoder.encode(Row("here", {**row, "tools": [called]}))

    assert learnt_texts(plain, made) == ["tea<|im_end|>\n"]
    assert learnt_texts(with_a_tool, made) == ["tea<|im_end|>\n"]
    assert made.decode(with_a_tool.tokens).startswith("with tools <|im_start|>user")
    assert len(with_tools.tokens) in (len(plain.tokens), len(with_a_tool.tokens))


def test_a_line_break_that_a_tokenizer_drops_makes_no_token_of_the_next_turn_learnt(tmp_path):
    tokenizers = pytest.importorskip("tokenizers")
    special = ["[UNK]", "<|im_start|>", "<|im_end|>"]
    words = tokenizers.Tokenizer(tokenizers.models.WordPiece(unk_token="[UNK]"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.BertPreTokenizer()
    trainer = tokenizers.trainers.WordPieceTrainer(vocab_size=120, special_tokens=special)
    words.train_from_iterator(["user assistant tea milk what of ?"] * 3, trainer)
    transformers = pytest.importorskip("transformers")
    made = transformers.PreTrainedTokenizerFast(
        tokenizer_object=words, unk_token="[UNK]", additional_special_tokens=special[1:]
    )
    made.chat_template = CHATML
    made.save_pretrained(tmp_path)

    document = Encoder(str(tmp_path)).encode(Row("here", conversation("tea", "milk")))

    learnt = made.convert_ids_to_tokens(document.tokens[document.is_learnt])
    assert learnt == ["tea", "<|im_end|>", "milk", "<|im_end|>"]


def test_a_template_that_refuses_a_conversation_is_quoted(tokenizer, tmp_path):
    _, folder = tokenizer
    file = tmp_path / "template"
    file.write_text("{{ raise_exception('only three turns') }}")

    with pytest.raises(DataError, match=r"train.jsonl:1: .* fails: .*only three turns"):
        opened(tmp_path, folder, [conversation("a")], template=str(file))


def test_variables_reach_the_template(tokenizer, tmp_path):
    _, folder = tokenizer
    file = tmp_path / "template"
    file.write_text("{{ mood }} " + CHATML)
    options = {"template": str(file), "template_variables": {"mood": "calm"}}

    data = opened(tmp_path, folder, [conversation("tea")], **options)

    assert "calm <|im_start|>user" in data.explain()[1]


def test_a_tokenizer_that_cannot_serve_is_an_error_of_the_configuration(tmp_path):
    rows = [conversation("tea")]
    bare_folder = str(tmp_path / "bare")
    endless_folder = str(tmp_path / "endless")
    made = make_tokenizer(template=None)
    made.save_pretrained(bare_folder)
    made.eos_token = None
    made.save_pretrained(endless_folder)

    with pytest.raises(ConfigError, match=r"no chat template, which .*train\.jsonl:1 needs"):
        opened(tmp_path, bare_folder, rows)
    with pytest.raises(ConfigError, match=r"no end token, which .*train\.jsonl:1 needs"):
        opened(tmp_path, endless_folder, [{"text": "rain"}])
    with pytest.raises(ConfigError, match=r"data\.tokenizer"):
        opened(tmp_path, str(tmp_path / "nowhere"), rows)
    with pytest.raises(ConfigError, match="names a tokenizer"):
        opened(tmp_path, None, rows)
    with pytest.raises(ConfigError, match=r"data\.template"):
        opened(tmp_path, bare_folder, rows, template="nowhere")


def test_code_of_a_tokenizers_folder_is_not_run(tmp_path):
    folder = tmp_path / "remote"
    make_tokenizer().save_pretrained(folder)
    path = folder / "tokenizer_config.json"
    config = json.loads(path.read_text())
    config["tokenizer_class"] = "Own"
    config["auto_map"] = {"AutoTokenizer": [None, "own.Own"]}
    path.write_text(json.dumps(config))
    (folder / "own.py").write_text("raise SystemExit('run')")
    with pytest.raises(ConfigError, match="code of its own, which is not run"):
        opened(tmp_path, str(folder), [conversation("tea")])


LONG = "snow milk " * 40


def test_long_conversations_are_cut(tokenizer, tmp_path):
    _, folder = tokenizer
    rows = [{"text": "rain"}, {"text": LONG}]

    cut = opened(tmp_path, folder, rows, context=40, too_long="cut", pack=False)

    is_learnt = cut[1]["labels"] != -100
    assert is_learnt.sum() == 39
    unlearnt = [{"prompt": LONG, "completion": "rain"}]
    with pytest.raises(DataError, match=r"jsonl:1: no token of its first 40 tokens is"):
        opened(tmp_path, folder, unlearnt, context=40, too_long="cut")


def test_long_conversations_are_dropped(tokenizer, tmp_path, caplog):
    _, folder = tokenizer
    rows = [{"text": "rain"}, {"text": LONG}]

    dropped = opened(tmp_path, folder, rows, context=40, too_long="drop")

    assert len(dropped) == 1
    assert "1 conversations of more than 40 tokens are left out" in caplog.text
    long = [{"prompt": LONG, "completion": "rain"}]
    with pytest.raises(DataError, match="all 1 conversations are longer"):
        opened(tmp_path, folder, long, context=40, too_long="drop")


def learnt_of(root, folder, split, **options):
    """Return the labels of each conversation of a split, which tell them apart."""
    data = chat(str(root), split, folder, 128, pack=False, **options)
    return {tuple(data[index]["labels"].tolist()) for index in range(len(data))}


def test_val_is_cut_from_train_or_a_fold_of_it(tokenizer, tmp_path):
    _, folder = tokenizer
    write_rows(tmp_path / "train.jsonl", conversations(20))

    train = learnt_of(tmp_path, folder, "train")
    val = learnt_of(tmp_path, folder, "val")
    folds = [learnt_of(tmp_path, folder, "val", fold=n, folds=4) for n in range(4)]

    assert len(train) == 18
    assert len(val) == 2
    assert train.isdisjoint(val)
    assert set.union(*folds) == train | val
    assert sum(len(fold) for fold in folds) == 20


def test_a_val_of_its_own_is_not_cut(tokenizer, tmp_path):
    _, folder = tokenizer
    write_rows(tmp_path / "train.jsonl", conversations(20))
    write_rows(tmp_path / "val.jsonl", conversations(3, 20))

    assert len(learnt_of(tmp_path, folder, "train")) == 20
    assert len(learnt_of(tmp_path, folder, "val")) == 3


def test_a_test_that_is_not_there_is_none_and_an_empty_one_is_refused(tokenizer, tmp_path):
    _, folder = tokenizer
    root = str(tmp_path)
    write_rows(tmp_path / "train.jsonl", conversations(20))
    assert chat(root, "test", folder) is None

    (tmp_path / "test.jsonl").write_text("\n")

    with pytest.raises(DataError, match="holds no conversation"):
        chat(root, "test", folder)
    with pytest.raises(DataError, match=r"nor a folder with a train\.jsonl"):
        chat(str(tmp_path / "nowhere"), "train", folder)


def test_the_plan_shows_what_is_learnt(tokenizer, tmp_path):
    _, folder = tokenizer
    rows = [conversation("tea\nmilk"), {"text": "rain"}]

    first, second = opened(tmp_path, folder, rows, context=64).explain()

    assert first.startswith("2 conversations in 1 rows of 64 tokens")
    assert second.endswith(r"assistant\n«tea\nmilk<|im_end|>\n»")


def test_control_tokens_in_a_text_are_kept_where_they_are_asked_for(tokenizer, tmp_path):
    made, folder = tokenizer
    row = conversation("tea<|im_end|>milk")

    dataset = opened(tmp_path, folder, [row], context=64, control_tokens="keep")

    (end,) = made.encode("<|im_end|>", add_special_tokens=False)
    is_end = dataset[0]["input_ids"] == end
    # Of the question (which quotes the answer), its turn, the answer, and its turn.
    assert is_end.sum() == 4
    assert opened(tmp_path, folder, [{"text": "a<|im_end|>b"}], context=64) is not None


def test_keys_that_are_not_read_are_told(tokenizer, tmp_path):
    _, folder = tokenizer
    rows = [{"text": "rain", "mesages": []}, {"text": "snow", "id": 3}]

    told = opened(tmp_path, folder, rows, context=64).explain()

    assert told[-1] == "keys of lines that are not read: id, mesages"
    told = opened(tmp_path, folder, [{"text": "a"}]).explain()
    assert "not read" not in str(told)
