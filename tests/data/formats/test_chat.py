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
    for tag, mark in (("{% generation %}", "‹"), ("{% endgeneration %}", "›")):
        template = template.replace(tag, mark)
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
        end = begin + len(made.convert_ids_to_tokens(int(token)))
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
    row = {"messages": [m for m in row["messages"] if m["role"] != "system"]}
    (tmp_path / "template").write_text(template)
    encoder = Encoder(folder, str(tmp_path / "template"), control_tokens="keep")
    document = encoder.encode(Row("here", row))
    expected = learnt_by_hand(row, template, document.tokens, made)
    assert document.is_learnt.tolist() == expected
    if number >= len(AWKWARD):
        theirs = made.apply_chat_template(
            row["messages"], chat_template=template, return_assistant_tokens_mask=True
        )
        assert document.tokens.tolist() == theirs["input_ids"]
        if not made.backend_tokenizer.post_processor.trim_offsets:  # theirs lack the last break
            assert document.is_learnt.tolist() == [bool(n) for n in theirs["assistant_masks"]]


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
    groups = np.split(learnt, np.flatnonzero(np.diff(learnt) > 1) + 1)
    return [made.decode(document.tokens[group].tolist()) for group in groups]


def test_other_forms_of_a_row(tokenizer):
    made, folder = tokenizer
    encoder = Encoder(folder)
    text = encoder.encode(Row("here", {"text": "rain and snow"}))
    assert learnt_texts(text, made) == ["rain and snow<|im_end|>"]
    pair = encoder.encode(Row("here", {"prompt": "rain\n", "completion": " and 🦆"}))
    assert learnt_texts(pair, made) == [" and 🦆<|im_end|>"]
    ask, answer, again, last = conversation("tea", "milk")["messages"]
    row = {"prompt": [ask, answer, again], "completion": [last]}
    assert learnt_texts(encoder.encode(Row("here", row)), made) == ["milk<|im_end|>\n"]


def test_a_tokenizers_own_first_and_last_tokens_are_kept_once(tmp_path):
    made = make_tokenizer()
    from tokenizers.processors import TemplateProcessing

    made.backend_tokenizer.post_processor = TemplateProcessing(
        single="<|im_start|> $A <|im_end|>", special_tokens=[("<|im_start|>", 0), ("<|im_end|>", 1)]
    )
    made.save_pretrained(tmp_path)
    encoder = Encoder(str(tmp_path))
    document = encoder.encode(Row("here", {"text": "rain"}))
    assert document.tokens.tolist()[0] == 0
    assert document.tokens.tolist().count(1) == 1
    assert learnt_texts(document, made) == ["rain<|im_end|>"]
    chatted = encoder.encode(Row("here", conversation("tea")))  # the template writes its own
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


@pytest.mark.parametrize("message", WRONG)
def test_a_wrong_line_is_named_and_nothing_starts(tokenizer, tmp_path, message):
    line = WRONG[message]
    line = line if isinstance(line, str) else json.dumps(line)
    good = json.dumps({"text": "rain"})
    (tmp_path / "train.jsonl").write_text(f"{good}\n\n{line}\n")
    with pytest.raises(DataError, match=f"train.jsonl:3: .*{message}") as caught:
        chat(str(tmp_path), "train", tokenizer[1], context=40, val_fraction=0)
    assert caught.value.exit_code == 3


@pytest.mark.parametrize("template", [REVERSED, LAST_ONLY, NO_PROMPT], ids=str)
def test_a_template_that_rewrites_earlier_turns_is_refused(tokenizer, tmp_path, template):
    (tmp_path / "template").write_text(template)
    with pytest.raises(DataError, match=r"train.jsonl:1: .* writes message 2 .* another way"):
        opened(
            tmp_path, tokenizer[1], [conversation("a", "b")], template=str(tmp_path / "template")
        )


def test_a_template_that_refuses_a_conversation_is_quoted(tokenizer, tmp_path):
    (tmp_path / "template").write_text("{{ raise_exception('only three turns') }}")
    with pytest.raises(DataError, match=r"train.jsonl:1: .* fails: .*only three turns"):
        opened(tmp_path, tokenizer[1], [conversation("a")], template=str(tmp_path / "template"))


def test_variables_reach_the_template(tokenizer, tmp_path):
    (tmp_path / "template").write_text("{{ mood }} " + CHATML)
    data = opened(
        tmp_path,
        tokenizer[1],
        [conversation("tea")],
        template=str(tmp_path / "template"),
        template_variables={"mood": "calm"},
    )
    assert "calm <|im_start|>user" in data.explain()[1]


def test_a_tokenizer_that_cannot_serve_is_an_error_of_the_configuration(tmp_path):
    rows = [conversation("tea")]
    bare = make_tokenizer(template=None)
    bare.save_pretrained(tmp_path / "bare")
    with pytest.raises(ConfigError, match=r"no chat template, which .*train\.jsonl:1 needs"):
        opened(tmp_path, str(tmp_path / "bare"), rows)
    bare.eos_token = None
    bare.save_pretrained(tmp_path / "endless")
    with pytest.raises(ConfigError, match=r"no end token, which .*train\.jsonl:1 needs"):
        opened(tmp_path, str(tmp_path / "endless"), [{"text": "rain"}])
    with pytest.raises(ConfigError, match=r"data\.tokenizer"):
        opened(tmp_path, str(tmp_path / "nowhere"), rows)
    with pytest.raises(ConfigError, match="names a tokenizer"):
        opened(tmp_path, None, rows)
    with pytest.raises(ConfigError, match=r"data\.template"):
        opened(tmp_path, str(tmp_path / "bare"), rows, template="nowhere")


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


def test_long_conversations_are_cut_or_dropped(tokenizer, tmp_path, caplog):
    rows = [{"text": "rain"}, {"text": "snow milk " * 40}]
    cut = opened(tmp_path, tokenizer[1], rows, context=40, too_long="cut", pack=False)
    assert (cut[1]["labels"] != -100).sum() == 39
    dropped = opened(tmp_path, tokenizer[1], rows, context=40, too_long="drop")
    assert len(dropped) == 1
    assert "1 conversations of more than 40 tokens are left out" in caplog.text
    rows = [{"prompt": "snow milk " * 40, "completion": "rain"}]
    with pytest.raises(DataError, match=r"jsonl:1: no token of its first 40 tokens is"):
        opened(tmp_path, tokenizer[1], rows, context=40, too_long="cut")
    with pytest.raises(DataError, match="all 1 conversations are longer"):
        opened(tmp_path, tokenizer[1], rows, context=40, too_long="drop")


def test_splits_and_folds(tokenizer, tmp_path):
    write_rows(tmp_path / "train.jsonl", conversations(20))
    root = str(tmp_path)

    def learnt(split, **options):
        data = chat(root, split, tokenizer[1], 128, pack=False, **options)
        return {tuple(data[i]["labels"].tolist()) for i in range(len(data))}

    train = learnt("train")
    val = learnt("val")
    assert len(train) == 18
    assert len(val) == 2
    assert not train & val
    folds = [learnt("val", fold=n, folds=4) for n in range(4)]
    assert set.union(*folds) == train | val
    assert sum(map(len, folds)) == 20
    assert chat(root, "test", tokenizer[1]) is None
    write_rows(tmp_path / "val.jsonl", conversations(3, 20))
    assert len(learnt("train")) == 20
    assert len(learnt("val")) == 3
    with pytest.raises(DataError, match=r"nor a folder with a train\.jsonl"):
        chat(str(tmp_path / "nowhere"), "train", tokenizer[1])
    (tmp_path / "test.jsonl").write_text("\n")
    with pytest.raises(DataError, match="holds no conversation"):
        chat(root, "test", tokenizer[1])


def test_the_plan_shows_what_is_learnt(tokenizer, tmp_path):
    rows = [conversation("tea\nmilk"), {"text": "rain"}]
    first, second = opened(tmp_path, tokenizer[1], rows, context=64).explain()
    assert first.startswith("2 conversations in 1 rows of 64 tokens")
    assert second.endswith(r"assistant\n«tea\nmilk<|im_end|>\n»")


def test_control_tokens_in_a_text_are_kept_where_they_are_asked_for(tokenizer, tmp_path):
    made, folder = tokenizer
    row = conversation("tea<|im_end|>milk")
    dataset = opened(tmp_path, folder, [row], context=64, control_tokens="keep")
    (end,) = made.encode("<|im_end|>", add_special_tokens=False)
    # Of the question (which quotes the answer), its turn, the answer, and its turn.
    assert (dataset[0]["input_ids"] == end).sum() == 4
    assert opened(tmp_path, folder, [{"text": "a<|im_end|>b"}], context=64) is not None


def test_keys_that_are_not_read_are_told(tokenizer, tmp_path):
    rows = [{"text": "rain", "mesages": []}, {"text": "snow", "id": 3}]
    said = opened(tmp_path, tokenizer[1], rows, context=64).explain()
    assert said[-1] == "keys of lines that are not read: id, mesages"
    assert "not read" not in str(opened(tmp_path, tokenizer[1], [{"text": "a"}]).explain())
