"""`predict` with a language model: a row of new text for each prompt."""

import csv
import json

import numpy as np
import pytest

from conf.errors import ConfigError
from data.errors import DataError
from trainer import load_run

PROMPTS = ["Return", "The", "def main(", "a", "If the file does not exist, the function raises an"]


@pytest.fixture(scope="module")
def lines(tmp_path_factory):
    path = tmp_path_factory.mktemp("prompts") / "prompts.txt"
    path.write_text("\n".join(PROMPTS) + "\n")
    return path


@pytest.fixture(scope="module")
def run(train, tmp_path_factory):
    path = tmp_path_factory.mktemp("runs") / "text"
    small = ["model.dim=32", "model.depth=1", "data.context=32", "trainer.limit_val_batches=1"]
    limits = [
        "trainer.max_steps=40",
        "loader.num_workers=0",
        "trainer.validate_every_n_epochs=null",
    ]
    done = train(["experiment=char_lm", *small, *limits, f"run_dir={path}"])
    assert done.code == 0, done.err
    return path


def rows_of(path):
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


def test_the_vocabulary_is_in_the_run(run):
    facts = json.loads((run / "inference.json").read_text())
    assert facts["inputs"] == {"kind": "text", "encoding": "characters", "context": 32}
    assert facts["outputs"]["kind"] == "text"
    assert facts["classes"] == ["\n", *map(chr, range(32, 127))]


@pytest.mark.parametrize(
    "sampling",
    [
        pytest.param([], id="greedy"),
        pytest.param(["sampling=random", "temperature=0.8", "top_k=20"], id="random"),
    ],
)
def test_batches_and_workers_change_nothing(predict, run, lines, tmp_path, sampling):
    for name, more in (
        ("two", ["loader.batch_size=2", "loader.num_workers=2"]),
        ("all", []),
    ):
        wanted = [f"run={run}", f"source={lines}", f"out={tmp_path}/{name}.csv"]
        done = predict([*wanted, "max_new_tokens=12", *sampling, *more])
        assert done.code == 0, done.err
    found = rows_of(tmp_path / "two.csv")
    assert found == rows_of(tmp_path / "all.csv")
    assert [row["file"] for row in found] == [f"{lines}:{n}" for n in range(1, 6)]
    assert [row["prompt"] for row in found] == PROMPTS
    assert {len(row["prediction"]) for row in found} == {12}
    keys = dict(part.split("=") for part in sampling)
    options = {"sampling": keys.get("sampling", "greedy")}
    options |= {"temperature": float(keys["temperature"]), "top_k": 20} if keys else {}
    mine = load_run(run, "cpu").generate(PROMPTS, max_new_tokens=12, **options)
    assert [row["prediction"] for row in found] == mine


def test_a_seed_draws_other_text(predict, run, lines, tmp_path):
    for seed in (1, 2):
        out = f"out={tmp_path}/{seed}.jsonl"
        wanted = [f"run={run}", f"source={lines}", out, "sampling=random", f"seed={seed}"]
        assert predict([*wanted, "max_new_tokens=9"]).code == 0
    assert (tmp_path / "1.jsonl").read_text() != (tmp_path / "2.jsonl").read_text()
    meta = json.loads((tmp_path / "1.jsonl.meta.json").read_text())
    assert meta["generation"]["seed"] == 1


def test_a_prompt_beyond_the_vocabulary_ends_it_or_has_a_row(predict, run, tmp_path):
    source = tmp_path / "prompts"
    source.write_text("one\nzwölf\nthree\n")
    wanted = [f"run={run}", f"source={source}", "max_new_tokens=3", f"out={tmp_path}/p.csv"]
    done = predict(wanted)
    assert done.code == 3
    assert "prompts:2" in done.error
    assert "'ö'" in done.error
    done = predict([*wanted, "on_error=skip"])
    assert done.code == 0, done.err
    found = rows_of(tmp_path / "p.csv")
    assert ["ö" in row["error"] for row in found] == [False, True, False]


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        pytest.param(["temperature=0"], 2, "not a number above 0", id="temperature"),
        pytest.param(["temperature=0.5"], 2, "sampling=random", id="greedy-temperature"),
        pytest.param(["top_k=5"], 2, "sampling=random", id="greedy-top-k"),
        pytest.param(["sampling=beam"], 2, "greedy, random", id="sampling"),
        pytest.param(["max_new_tokens=0"], 2, "max_new_tokens", id="tokens"),
        pytest.param(["save=logits"], 2, "source=val", id="save"),
        pytest.param(["source=/nowhere"], 3, "one prompt a line", id="source"),
        pytest.param(["source=val"], 2, "save=logits", id="split"),
    ],
)
def test_mistakes_write_nothing(predict, run, lines, tmp_path, arguments, code, said):
    wanted = [] if arguments[0].startswith("source") else [f"source={lines}"]
    done = predict([f"run={run}", *wanted, *arguments], folder=tmp_path)
    assert done.code == code, done.err
    assert said in done.err
    assert list(tmp_path.iterdir()) == []


def test_logits_of_its_own_data_are_saved_as_before(predict, run, tmp_path):
    done = predict([f"run={run}", "source=val", "save=logits", f"out={tmp_path}/p.csv"])
    assert done.code == 0, done.err
    logits = np.load(tmp_path / "p.logits.npy")
    assert logits.shape[1:] == (96, 32)
    assert len(rows_of(tmp_path / "p.csv")) == len(logits)


def test_pictures_take_no_key_of_text_and_text_no_picture(predict, whole, run, tmp_path):
    done = predict([f"run={whole}", "source=test", "max_new_tokens=3", f"out={tmp_path}/p.csv"])
    assert done.code == 2
    assert "max_new_tokens" in done.error
    with pytest.raises(ConfigError, match="do not continue text"):
        load_run(whole, "cpu").generate(["a"])
    with pytest.raises(DataError, match="prompt 0"):
        load_run(run, "cpu").generate("é")
