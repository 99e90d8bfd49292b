"""`train experiment=chat` from folders of a model and of conversations, to a run that is whole."""

import json

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

pytest.importorskip("peft", reason="the extra peft is not installed")
pytest.importorskip("rouge_score", reason="the extra rouge is not installed")

from regimen.models import lora
from regimen.scripts.convert import convert
from same_run import logged, state_of
from toy_chat import conversation, conversations, make_tokenizer, write_model, write_rows

FEW = [
    "data.context=128",
    "loader.batch_size=8",
    "trainer.max_epochs=2",
    "trainer.log_every_n_steps=1",
    "callbacks.checkpoint.every_n_steps=3",
    "callbacks.checkpoint.save_top_k=-1",
]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("chat")
    write_model(root / "model")
    write_rows(root / "data/train.jsonl", conversations(50))
    write_rows(root / "data/val.jsonl", conversations(12, 50))
    return root


def line(folders, run, *more):
    given = [f"model.name={folders / 'model'}", f"data.root={folders / 'data'}", f"run_dir={run}"]
    return ["experiment=chat", *given, *FEW, *more]


def weights(run):
    return torch.load(run / "checkpoints/last.pt", weights_only=True)["model"]


def losses(run):
    return [entry["train/loss"] for entry in logged(run) if "train/loss" in entry]


@pytest.fixture(scope="module")
def trained(train, folders):
    run = folders / "run"
    train(line(folders, run, "trainer.precision=fp64"))
    return run


def test_adapters_are_trained_and_the_base_stays(folders, trained):
    from safetensors.torch import load_file

    base = load_file(folders / "model/model.safetensors")
    convert([str(trained / "checkpoints/last.pt"), str(trained / "whole.pt"), "--whole"])
    after = torch.load(trained / "whole.pt", weights_only=True)["model"]
    kept = {
        name.removeprefix("model.").replace(".base_layer", ""): value
        for name, value in after.items()
        if "lora_" not in name and "lm_head" not in name
    }
    assert kept.keys() == base.keys()
    assert all(torch.equal(value, base[name].double()) for name, value in kept.items())
    assert all(value.any() for name, value in after.items() if "lora_B" in name)
    found = losses(trained)
    assert found[-1] < found[0]


@pytest.mark.parametrize("steps", [2, 4])
def test_micro_batches_change_nothing(train, folders, trained, tmp_path, steps):
    run = tmp_path / "run"
    words = ["trainer.precision=fp64", f"trainer.gradient_accumulation_steps={steps}"]

    train(line(folders, run, *words))

    assert losses(run) == pytest.approx(losses(trained), rel=1e-12)
    other = weights(run)
    for name, value in weights(trained).items():
        torch.testing.assert_close(other[name], value, rtol=0, atol=1e-10)


@pytest.mark.slow
def test_two_processes_change_nothing(train, folders, trained, tmp_path):
    two = ["trainer.precision=fp64", "strategy=ddp", "strategy.devices=2"]
    train(line(folders, tmp_path / "run", *two))
    assert losses(tmp_path / "run") == pytest.approx(losses(trained), rel=1e-12)
    other = weights(tmp_path / "run")
    for name, value in weights(trained).items():
        torch.testing.assert_close(other[name], value, rtol=0, atol=1e-10)


def test_a_resume_in_mid_epoch_is_exact(train, folders, trained, tmp_path):
    run = tmp_path / "run"
    checkpoint = trained / "checkpoints/step-00000003.pt"

    train(line(folders, run, "trainer.precision=fp64", f"resume={checkpoint}"))

    assert state_of(run) == state_of(trained)


def test_an_evaluation_repeats_the_last_validation(evaluated, trained):
    last = [entry for entry in logged(trained) if "val/loss" in entry][-1]
    found = evaluated(trained, "split=val", "checkpoint=last")
    for key in ("val/loss", "val/perplexity", "val/token_accuracy"):
        assert found[key] == last[key]


def test_all_weights_are_trained_with_transformers(train, folders, tmp_path):
    run = tmp_path / "run"
    options = ["model=transformers", "optimizer.lr=1e-3", "data.pack=false"]
    train(line(folders, run, *options))
    assert not any("lora" in name for name in weights(run))
    assert losses(run)[-1] < losses(run)[0]


def test_the_plan_shows_the_rows_and_the_frozen_group(train, folders, tmp_path):
    plan = train(line(folders, tmp_path / "run", "dry_run=true")).out
    assert "data.train: 50 conversations in" in plan
    assert "first conversation, learnt parts in «»: <|im_start|>user" in plan
    assert "\nfrozen " in plan
    assert "predict cannot ask" not in plan


@pytest.mark.parametrize(
    ("code", "override", "named"),
    [
        (2, "model.targets=[q_prj]", "q_proj, k_proj"),
        (2, "data.tokenizer=/nowhere/at/all", "data.tokenizer"),
        (3, "data.context=8", "train.jsonl:1: "),
    ],
)
def test_a_mistake_starts_nothing(train, folders, tmp_path, code, override, named):
    run = train(line(folders, tmp_path / "run", override), code)
    assert named in run.error
    assert not (tmp_path / "run").exists()


def test_a_tokenizer_with_more_tokens_than_the_model_starts_nothing(train, folders, tmp_path):
    model = write_model(tmp_path / "model", vocab_size=400)
    run = train(line(folders, tmp_path / "run", f"model.name={model}"), 2)
    assert "vocabulary of 400 tokens, and the data have " in run.error


@pytest.mark.slow
def test_a_loss_in_chunks_changes_nothing_on_two_processes(train, folders, trained, tmp_path):
    if not hasattr(torch.nn.functional, "linear_cross_entropy"):
        pytest.skip("this torch has no linear_cross_entropy")
    chunked = ["trainer.precision=fp64", "task.chunked_loss=true"]
    train(line(folders, tmp_path / "run", *chunked, "strategy=ddp", "strategy.devices=2"))
    assert losses(tmp_path / "run") == pytest.approx(losses(trained), rel=1e-12)
    other = weights(tmp_path / "run")
    for name, value in weights(trained).items():
        torch.testing.assert_close(other[name], value, rtol=0, atol=1e-10)


ANSWERING = ["task.generate.max_new_tokens=12", "task/metrics=answers", "model=transformers"]


@pytest.fixture(scope="module")
def answering(train, folders):
    """A run that answers in each validation, and keeps the best by them."""
    run = folders / "answering"
    monitor = ["callbacks.checkpoint.monitor=val/rouge_l", "optimizer.lr=1e-2"]
    train(line(folders, run, *ANSWERING, *monitor, "trainer.max_epochs=4"))
    return run


def scores(run):
    return [entry["val/rouge_l"] for entry in logged(run) if "val/rouge_l" in entry]


def asked(folders, *rows):
    return f"source={write_rows(folders / 'questions.jsonl', list(rows))}"


@pytest.fixture(scope="module")
def predict(train, folders):
    """Run `predict` on rows, and return the lines that it writes."""

    def run(path, rows, *words, code=0):
        out = folders / "answers.jsonl"
        words = [f"run={path}", asked(folders, *rows), f"out={out}", "overwrite=true", *words]
        ended = train(words, code, command="predict")
        if code:
            return ended.error
        return [json.loads(text) for text in out.read_text().splitlines()]

    return run


def test_the_best_checkpoint_has_the_best_answers_and_the_table_is_in_tensorboard(answering):
    found = scores(answering)
    assert len(found) == 4
    best = torch.load(answering / "checkpoints/best.pt", weights_only=True)["state"]["counters"]
    steps = {e["step"]: e["val/rouge_l"] for e in logged(answering) if "val/rouge_l" in e}
    assert steps[best["global_step"]] == max(found) > min(found)
    events = EventAccumulator(str(answering / "tensorboard")).Reload()
    tables = events.Tensors("val/answers/text_summary")
    assert len(tables) == 4
    text = tables[-1].tensor_proto.string_val[0].decode()
    assert text.startswith("| prompt | answer | reference |")
    assert "| milk number 51, and milk. |" in text


@pytest.mark.slow
def test_an_evaluation_and_a_resume_answer_as_the_run_did(evaluated, train, folders, answering):
    found = evaluated(answering, "split=val", "checkpoint=last", "loader.eval_batch_size=1")
    assert found["val/rouge_l"] == scores(answering)[-1]
    begun = f"resume={answering / 'checkpoints/step-00000003.pt'}"
    monitor = ["callbacks.checkpoint.monitor=val/rouge_l", "optimizer.lr=1e-2"]
    run = folders / "answering_resumed"
    train(line(folders, run, *ANSWERING, *monitor, "trainer.max_epochs=4", begun))
    assert state_of(run) == state_of(answering)
    assert scores(run)[-1] == scores(answering)[-1]


def test_predict_answers_each_line_in_any_batch(predict, answering):
    rows = [{"id": 7, **conversation("tea", "milk")}, *conversations(4, 70), {"prompt": "rain"}]
    rows[1]["messages"] = rows[1]["messages"][:-1]
    found = predict(answering, rows, "loader.batch_size=1", "max_new_tokens=5")
    assert [{k: v for k, v in row.items() if k != "answer"} for row in found] == rows
    assert all(isinstance(row["answer"], str) for row in found)
    same = predict(answering, rows, "loader.batch_size=13", "task.generate.max_new_tokens=5")
    assert found == same


def test_predict_answers_with_a_run_that_was_trained_without(predict, folders, trained):
    by_hand = answers_by_hand(folders, trained, conversations(3, 80), 6)
    found = predict(trained, conversations(3, 80), "max_new_tokens=6", "checkpoint=last")
    assert [row["answer"] for row in found] == by_hand


def test_predict_finds_the_base_and_its_tokenizer_elsewhere(predict, folders, trained):
    rows = conversations(2, 80)
    expected = predict(trained, rows, "max_new_tokens=4")
    moved = (folders / "model").rename(folders / "elsewhere")
    try:
        assert predict(trained, rows, "max_new_tokens=4", f"model.name={moved}") == expected
    finally:
        moved.rename(folders / "model")


def answers_by_hand(folders, run, rows, count):
    """Return the likeliest continuations, of one conversation at a time, without a cache."""
    made = make_tokenizer()
    model = lora.build(str(folders / "model"), 512).double().eval()
    left_out = model.load_state_dict(weights(run), strict=False).missing_keys
    assert not any("lora" in name for name in left_out)
    answers = []
    for row in rows:
        text = made.apply_chat_template(
            row["messages"][:-1], add_generation_prompt=True, tokenize=False
        )
        tokens = made(text)["input_ids"]
        new = []
        with torch.no_grad():
            while len(new) < count and made.eos_token_id not in new:
                logits = model({"input_ids": torch.tensor([[*tokens, *new]])})
                new.append(int(logits[0, -1].argmax()))
        answers.append(made.decode(new, skip_special_tokens=True))
    return answers


def test_a_line_that_asks_nothing_is_named(predict, answering):
    error = predict(answering, [{"prompt": "rain"}, {"text": "rain"}], code=3)
    assert "questions.jsonl:2: is a text, which asks for no answer" in error


@pytest.mark.slow
def test_lines_that_ask_nothing_may_be_left_out(predict, answering):
    rows = [{"text": "rain"}, {"prompt": "rain"}]
    found = predict(answering, rows, "on_error=skip", "loader.batch_size=1")
    assert "asks for no answer" in found[0]["error"]
    assert "answer" in found[1]


@pytest.mark.parametrize(
    ("override", "named"),
    [
        ("sampling=random", "sampling: has no effect on answers to conversations"),
        ("task.generate.max_new_tokens=0", "expected an integer >= 1, got 0"),
        ("max_new_tokens=5000", "than the 256 positions of the model"),
    ],
)
def test_keys_that_predict_cannot_keep_are_refused(predict, answering, override, named):
    assert named in predict(answering, [{"prompt": "rain"}], override, code=2)


@pytest.mark.parametrize(
    ("override", "named"),
    [
        ("task.generate.max_new_token=3", "did you mean max_new_tokens?"),
        ("task.generate.max_new_tokens=500", "than the 256 positions of the model"),
        ("callbacks.checkpoint.monitor=val/rouge", "did you mean val/rouge_l?"),
        ("task.generate=null", "compares texts, and the task writes none"),
    ],
)
def test_a_mistake_in_answers_starts_nothing(train, folders, tmp_path, override, named):
    run = train(line(folders, tmp_path / "run", *ANSWERING, override), 2)
    assert named in run.error
    assert not (tmp_path / "run").exists()
