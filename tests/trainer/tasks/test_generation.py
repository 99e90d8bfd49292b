"""Answers: greedy as by hand, the same in any batch and process, each scored once."""

import math
import random
import zlib

import pytest
import torch

pytest.importorskip("transformers", reason="the extra transformers is missing")
pytest.importorskip("rouge_score", reason="the extra rouge is missing")

import torch.distributed.fsdp  # or every process would import it, and sympy with it
import transformers
from rouge_score.rouge_scorer import RougeScorer

import toys
from regimen.callbacks.pictures.answers import AnswerTable
from regimen.conf.errors import ConfigError
from regimen.data.errors import UnreadableError
from regimen.data.formats.chat import Encoder, chat
from regimen.data.formats.jsonl import Row
from regimen.data.formats.questions import QuestionFile
from regimen.models.transformers_adapter import Logits
from regimen.trainer.callback import Callback
from regimen.trainer.errors import ModelError, SampleError
from regimen.trainer.strategies.fsdp import FSDP
from regimen.trainer.tasks.chat import Chat
from regimen.trainer.tasks.classification import Classification
from regimen.trainer.tasks.text_metrics import ExactMatch, RougeL, takes_texts
from toy_chat import conversation, conversations, llama_config, make_tokenizer, write_rows

NEW = 10  # tokens of an answer
ROWS = [*conversations(17), {"text": "rain and snow"}, {"prompt": "milk\n", "completion": "salt"}]


class Texts:
    """Keeps what it is given."""

    takes_texts = True

    def __init__(self):
        self.reset()

    def reset(self):
        self.pairs = []

    def update(self, answers, references):
        self.pairs += zip(answers, references, strict=True)

    def merge_state(self, others):
        for other in others:
            self.pairs += other.pairs

    def compute(self):
        checksum = zlib.crc32(repr(sorted(self.pairs)).encode())
        return {"crc": float(checksum), "count": float(len(self.pairs))}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    made = make_tokenizer()
    made.save_pretrained(folder)
    return made, str(folder)


@pytest.fixture(scope="module")
def val(tokenizer, tmp_path_factory):
    root = tmp_path_factory.mktemp("data")
    write_rows(root / "train.jsonl", ROWS)
    return chat(str(root), "train", tokenizer[1], context=128, val_fraction=0, prompts=True)


def network(**options):
    """Return a Llama whose answers differ: in some of them it comes to an end."""
    torch.manual_seed(1)
    model = transformers.LlamaForCausalLM(llama_config(initializer_range=0.3, **options))
    return Logits(model).double()


def task_of(folder, **metrics):
    options = {"max_new_tokens": NEW, "batch_size": 4}
    return Chat(generate=options, tokenizer=folder, metrics=metrics)


def evaluated(folder, val, batch, model=None, strategy=None, callbacks=None):
    """Return the metrics of an evaluation, and the texts."""
    texts = Texts()
    task = task_of(folder, texts=texts, exact=ExactMatch(), rouge=RougeL())
    loader = toys.loader(val, batch=batch, shuffled=False, strategy=strategy)
    trainer = toys.trainer_of(
        task,
        loader,
        model=model or network(),
        val=loader,
        strategy=strategy,
        callbacks=callbacks,
    )
    return trainer.evaluate(), texts.pairs


@pytest.fixture(scope="module")
def whole(tokenizer, val):
    return evaluated(tokenizer[1], val, 3)


def greedy_by_hand(model, tokens, end):
    """Return the likeliest tokens, each from a forward pass over all before it."""
    new = []
    while len(new) < NEW:
        logits = model(torch.tensor([[*tokens, *new]]))
        likeliest = int(logits[0, -1].argmax())
        if likeliest == end:
            return new
        new.append(likeliest)
    return new


def question_of(row, tokenizer):
    """Return prompt and reference of a row; of a text, which asks nothing, None."""
    if "messages" in row:
        *before, last = row["messages"]
        prompt = tokenizer.apply_chat_template(before, add_generation_prompt=True, tokenize=False)
        return prompt, last["content"]
    if "prompt" in row:
        return row["prompt"], row["completion"]
    return None


@torch.no_grad()
def answers_by_hand(tokenizer):
    """Return answer and reference of each row that asks something."""
    model = network().eval()
    found = []
    for row in ROWS:
        question = question_of(row, tokenizer)
        if question is None:
            continue
        prompt, reference = question
        tokens = tokenizer(prompt, add_special_tokens=False)["input_ids"]
        new = greedy_by_hand(model, tokens, tokenizer.eos_token_id)
        answer = tokenizer.decode(new, skip_special_tokens=True)
        found.append((answer, reference))
    return found


def test_answers_are_those_by_hand_one_conversation_at_a_time(tokenizer, whole):
    made, _ = tokenizer
    metrics, found = whole
    expected = answers_by_hand(made)
    different = {answer for answer, _ in found}

    assert sorted(found) == sorted(expected)
    assert len(different) > len(found) / 2
    assert metrics["val/texts_count"] == len(ROWS) - 1

    scorer = RougeScorer(["rougeL"])
    rouge = []
    for answer, reference in expected:
        score = scorer.score(reference, answer)["rougeL"]
        rouge.append(score.fmeasure)
    mean = sum(rouge) / len(rouge)

    assert metrics["val/rouge"] == pytest.approx(mean, rel=1e-12)


@pytest.mark.parametrize("batch", [1, 2, 13])
def test_batches_change_no_answer_in_float32(tokenizer, val, batch):
    _, expected = evaluated(tokenizer[1], val, 5, network().float())
    _, found = evaluated(tokenizer[1], val, batch, network().float())
    assert found == expected


def test_processes_change_no_answer(ranks, tokenizer, val, whole):
    _, folder = tokenizer
    expected, _ = whole

    def run(strategy):
        metrics, _ = evaluated(folder, val, 4, strategy=strategy)
        return metrics

    for metrics in ranks(2, toys.in_group(run, devices=2)):
        for name in ("texts_crc", "texts_count", "exact", "rouge"):
            assert metrics[f"val/{name}"] == expected[f"val/{name}"]


@pytest.mark.slow
@pytest.mark.parametrize("units", [[], ["LlamaDecoderLayer"]], ids=["whole", "layers"])
def test_shards_wait_for_each_other_in_no_answer(ranks, tokenizer, val, whole, units):
    """The processes have unlike numbers of prompts, and the last batch is of one of them alone."""
    _, folder = tokenizer
    assert len(val) % 7 == 1

    def run(strategy):
        """Return the metrics before and after a training."""
        task = task_of(folder, texts=Texts())
        loader = toys.loader(val, batch=7, shuffled=False, strategy=strategy)
        model = network(tie_word_embeddings=False)
        trainer = toys.trainer_of(
            task,
            loader,
            model=model,
            val=loader,
            strategy=strategy,
            max_epochs=1,
        )
        before = trainer.evaluate()
        trainer.fit()
        return before, trainer.evaluate()

    first, second = ranks(2, toys.in_group(run, FSDP, devices=2, wrap_modules=units), patience=200)

    alone, _ = evaluated(folder, val, 2, network(tie_word_embeddings=False))
    before, after = first

    assert first == second
    assert before["val/texts_crc"] == alone["val/texts_crc"]
    assert after["val/texts_count"] == len(ROWS) - 1


def test_the_generation_config_of_a_model_changes_nothing_and_stays(tokenizer, val, whole):
    _, folder = tokenizer
    _, expected = whole
    model = network()
    inner = model.model
    inner.generation_config.update(
        do_sample=True,
        temperature=3.0,
        repetition_penalty=5.0,
        eos_token_id=[7],
        suppress_tokens=[5, 6],
    )
    config = inner.config.to_dict()
    generation_config = inner.generation_config.to_dict()

    _, found = evaluated(folder, val, 3, model)

    assert found == expected
    assert inner.config.to_dict() == config
    assert inner.generation_config.to_dict() == generation_config


def test_the_last_learnt_answer_is_asked_for_and_the_longest_prompt_sets_the_length(tokenizer):
    made, folder = tokenizer
    encoder = Encoder(folder)
    conversation_of_three = conversation("tea", "milk", "salt")
    messages = conversation_of_three["messages"]
    messages[-1]["learn"] = False
    row = Row("here", conversation_of_three)

    question = encoder.question(row, 128)
    prompt = made.apply_chat_template(messages[:3], add_generation_prompt=True, tokenize=False)

    assert made.decode(question.prompt) == prompt
    assert made.decode(question.reference) == "milk<|im_end|>\n"

    # Of a conversation that is cut, the last answer whose prompt is there.
    cut = encoder.question(row, len(question.prompt))
    assert made.decode(cut.reference) == "tea<|im_end|>\n"


def test_a_text_asks_for_no_answer(tokenizer):
    _, folder = tokenizer
    assert Encoder(folder).question(Row("here", {"text": "rain"}), 128) is None


@pytest.mark.parametrize(
    ("row", "named"),
    [
        ({"messages": []}, "'messages' is no list of messages"),
        ({"prompt": 5}, "'messages' is no list of messages"),
        ({"text": "rain"}, "is a text, which asks for no answer"),
        ({"prompt": ""}, "its prompt is empty"),
        ({"prompt": "rain", "answer": "no"}, "has a key 'answer'"),
        ({"messages": [{"role": "system", "content": "x"}]}, "ends with a message of 'system'"),
        ({}, "has no keys"),
    ],
)
def test_a_line_that_asks_nothing_is_named(tokenizer, tmp_path, row, named):
    _, folder = tokenizer
    path = write_rows(tmp_path / "rows.jsonl", [{"prompt": "rain"}, row])
    questions = QuestionFile(str(path), Encoder(folder))

    assert questions.faults[1].startswith(f"{path}:2: {named}")
    with pytest.raises(UnreadableError, match=r"rows.jsonl:2: "):
        questions[1]

    length = questions[0]["prompts"]["lengths"]
    assert int(length) > 0


def test_an_answer_ends_with_what_the_template_writes(tmp_path):
    made = make_tokenizer()
    made.eos_token = "<|im_start|>"
    made.save_pretrained(tmp_path)
    ends = made.convert_tokens_to_ids(["<|im_start|>", "<|im_end|>"])

    assert Encoder(str(tmp_path)).end_tokens == ends


def table_of(folder, val, batch):
    """Return the table that a training shows."""
    shown = []

    class Shown(Callback):
        def on_media(self, trainer, name, media):
            shown.append((name, media))

    loader = toys.loader(val, batch=batch, shuffled=False)
    trainer = toys.trainer_of(
        task_of(folder),
        loader,
        model=network(),
        val=loader,
        callbacks={"answers": AnswerTable(count=3), "shown": Shown()},
        lr=0.0,
        max_epochs=1,
    )
    trainer.fit()
    ((name, table),) = shown
    assert name == "val/answers"
    return table


def test_the_table_shows_the_first_conversations_whatever_the_batches(tokenizer, val):
    _, folder = tokenizer
    table = table_of(folder, val, batch=1)
    assert table_of(folder, val, batch=7) == table

    head, _, *lines = table.splitlines()
    assert head == "| prompt | answer | reference |"
    assert len(lines) == 3

    for line, row in zip(lines, ROWS, strict=False):
        question, answer = row["messages"][-2:]
        prompt, _, reference = line.split(" | ")
        assert question["content"] in prompt
        assert reference.removesuffix(" |") == answer["content"]


def lcs(one, other):
    """Return the length of the longest common subsequence."""
    lengths = [[0] * (len(other) + 1) for _ in range(len(one) + 1)]
    for i, a in enumerate(one):
        for j, b in enumerate(other):
            best = max(lengths[i][j + 1], lengths[i + 1][j])
            lengths[i + 1][j + 1] = lengths[i][j] + 1 if a == b else best
    return lengths[-1][-1]


def words_of(text):
    """Return the words: what stands between white space and punctuation, in small letters."""
    kept = [character if character.isalnum() else " " for character in text.lower()]
    return "".join(kept).split()


@pytest.mark.parametrize(
    ("answer", "reference"),
    [
        ("the cat sat", "The cat, it sat!"),
        ("über den Fluß", "über die Brücke den Fluß"),
        ("дождь и снег", "снег и дождь"),
        ("", "something"),
        ("!!!", "..."),
    ],
)
def test_rouge_l_is_that_of_the_words_of_any_script(answer, reference):
    answered = words_of(answer)
    wanted = words_of(reference)
    common = lcs(answered, wanted)
    expected = 0.0
    if common:
        precision = common / len(answered)
        recall = common / len(wanted)
        expected = 2 * precision * recall / (precision + recall)

    score = RougeL().score(answer, reference)

    assert score == pytest.approx(expected, rel=1e-12)


def test_exact_match_leaves_out_white_space_at_the_ends_alone():
    metric = ExactMatch()
    metric.reset()
    metric.update(["tea ", "a  b", "Tea", ""], ["\ntea", "a b", "tea", ""])

    assert metric.compute() == 0.5

    metric.reset()
    assert math.isnan(metric.compute())


def test_the_mean_is_the_same_to_the_last_bit_in_any_order():
    generator = random.Random(0)
    values = [generator.random() for _ in range(301)]

    def mean(*parts):
        metrics = []
        for part in parts:
            metric = RougeL()
            metric._scores = list(part)
            metrics.append(metric)
        first, *others = metrics
        first.merge_state(others)
        return first.compute()

    assert mean(values) == mean(values[200:], values[:7], values[7:200])


def test_metrics_of_torchmetrics_that_take_texts_are_known():
    text = pytest.importorskip("torchmetrics.text")
    assert takes_texts(text.CharErrorRate())
    assert not takes_texts(text.Perplexity())

    task = task_of(make_tokenizer(), cer=text.CharErrorRate(), exact=ExactMatch())
    assert task.modes() == {"cer": "min", "exact": "max"}

    task.update_text_metrics(["abcd"], ["abcx"])
    assert float(task.metrics()["cer"].compute()) == 0.25


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "task.generate.max_new_tokens: expected an integer >= 1, got None"),
        ({"max_new_tokens": 0}, "expected an integer >= 1, got 0"),
        ({"max_new_tokens": True}, "expected an integer >= 1, got True"),
        ({"max_new_tokens": 1.5}, "expected an integer >= 1, got 1.5"),
        ({"max_new_tokens": 9, "max_new_token": 8}, "no such key; did you mean max_new_tokens?"),
        ({"max_new_tokens": 9, "batch_size": None}, "batch_size: expected an integer >= 1"),
        (64, "task.generate: expected a mapping, got 64"),
    ],
)
def test_options_that_are_none_are_refused(options, message):
    with pytest.raises(ConfigError) as found:
        Chat(generate=options, tokenizer=make_tokenizer())
    assert message in str(found.value)


def test_texts_need_a_tokenizer_and_metrics_of_texts_a_task_that_writes_them():
    with pytest.raises(ModelError, match=r"task.tokenizer: is null"):
        Chat(generate={"max_new_tokens": 4})
    with pytest.raises(ModelError, match=r"task.metrics.match: .* the task writes none"):
        Chat(metrics={"match": ExactMatch()})
    with pytest.raises(ModelError, match=r"task.metrics.match: .* the task writes none"):
        Classification(3, metrics={"match": ExactMatch()})


def test_what_cannot_be_answered_is_refused(tokenizer, val):
    _, folder = tokenizer
    data = {"data.val": val}
    without_tokenizer = task_of("/nowhere/at/all")

    with pytest.raises(ConfigError, match=r"data.tokenizer: there is no folder /nowhere/at/all"):
        without_tokenizer.check_evaluation(network(), data)

    task = task_of(folder)
    short = network(max_position_embeddings=64)
    with pytest.raises(ModelError, match=r"Linear has no `generate`"):
        task.check_evaluation(torch.nn.Linear(2, 2), {})
    with pytest.raises(ModelError, match=r"than the 64 positions of the model"):
        task.check_evaluation(short, data)
    with pytest.raises(ModelError, match=r"data.val is a list, which has no prompts to answer"):
        task.check_evaluation(network(), {"data.val": [1]})

    batch = {name: value[None] for name, value in val[0].items() if name != "prompts"}
    with pytest.raises(SampleError, match=r"a batch has no prompts, which task.generate answers"):
        task.evaluation_step(network(), batch)
