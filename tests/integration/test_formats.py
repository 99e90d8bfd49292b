"""Data in others' formats from the command line: trained on, resumed and predicted for."""

import csv
import importlib.util
import io
import json
import tarfile

import numpy as np
import pytest
from PIL import Image

SHORT = ["trainer.max_epochs=2", "loader.num_workers=0", "callbacks.early_stopping=null"]


PIXEL = io.BytesIO()
Image.new("RGB", (8, 8)).save(PIXEL, "PNG")
PIXEL = PIXEL.getvalue()


def log_of(run_dir):
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [
        {k: v for k, v in line.items() if not k.startswith(("time/", "memory/"))} for line in lines
    ]


@pytest.fixture(scope="module")
def houses(tmp_path_factory):
    drawn = np.random.default_rng(0)
    path = tmp_path_factory.mktemp("houses") / "houses.csv"
    rows = [(r, t, 10 * r + 5 * t) for r, t in drawn.integers(1, 9, (120, 2)).tolist()]
    path.write_text("rooms,town,price\n" + "".join(f"{r},t{t},{p}\n" for r, t, p in rows))
    return path


def test_a_table_is_learned_and_predicted_for(train, houses, tmp_path):
    run_dir = tmp_path / "run"
    table = ["data=table", f"data.path={houses}", "data.target=price", f"run_dir={run_dir}"]
    wrong = train(["experiment=regression", *table, "data.channels=3"])
    assert wrong.code == 3
    assert wrong.error.endswith("set data.channels=9")
    asked = ["data.channels=9", *SHORT, "trainer.max_epochs=40"]
    done = train(["experiment=regression", *table, *asked])
    assert done.code == 0, done.err
    houses.with_name("new.csv").write_text("town,rooms\nt3,5\nt1,8\n")
    new = houses.with_name("new.csv")
    out = tmp_path / "answers.csv"
    words = [f"run={run_dir}", f"source={new}", f"out={out}"]
    assert train(words, command="predict").code == 0
    with out.open() as file:
        rows = list(csv.DictReader(file))
    assert [row["file"] for row in rows] == [f"{new}:2", f"{new}:3"]
    answers = [float(row["prediction"]) for row in rows]
    assert answers == pytest.approx([65, 85], abs=8)  # in the file's own units


def test_a_changed_table_is_told_and_encoded_as_before(train, evaluated, houses, tmp_path):
    run_dir, path = tmp_path / "run", tmp_path / "houses.csv"
    path.write_text(houses.read_text())
    table = ["data=table", f"data.path={path}", "data.target=price", "data.channels=9"]
    asked = ["experiment=regression", *table, *SHORT, f"run_dir={run_dir}"]
    assert train(asked).code == 0
    path.write_text(path.read_text() + "".join("900,t1,90000\n" for _ in range(120)))
    done = train([*asked, "trainer.max_epochs=3", "resume=auto"])
    assert done.code == 0, done.err
    assert "data.train, data.val, data.test: the rows are not those of the checkpoint" in done.err
    assert "encoded by the same statistics as before" in done.err
    evaluated(run_dir)


def test_a_dry_run_on_shards_writes_nothing(train, tmp_path):
    (tmp_path / "data").mkdir()
    with tarfile.open(tmp_path / "data" / "train.tar", "w") as archive:
        for number in range(12):
            for name, content in (
                (f"{number}.png", PIXEL),
                (f"{number}.cls", b"%d" % (number % 2)),
            ):
                member = tarfile.TarInfo(name)
                member.size = len(content)
                archive.addfile(member, io.BytesIO(content))
    shards = ["experiment=resnet18", "data=shards", f"data.root={tmp_path}/data", "model=mlp"]
    done = train(
        [*shards, "data.image_size=8", "loader.num_workers=0", "dry_run=true"], folder=tmp_path
    )
    assert done.code == 0, done.err
    assert [path.name for path in (tmp_path / "data").iterdir()] == ["train.tar"]


def test_text_of_bytes_is_continued(train, tmp_path):
    text, run_dir = tmp_path / "book.txt", tmp_path / "run"
    text.write_text("größer als groß. " * 200)
    small = ["model.dim=32", "model.depth=1", "data.context=32", "loader.batch_size=8"]
    tokens = ["experiment=char_lm", "data=tokens", f"data.root={text}", *small, *SHORT]
    done = train([*tokens, "trainer.max_epochs=6", f"run_dir={run_dir}"])
    assert done.code == 0, done.err
    prompts, out = tmp_path / "prompts.txt", tmp_path / "p.csv"
    prompts.write_text("größer\n")
    words = [f"run={run_dir}", f"source={prompts}", f"out={out}", "max_new_tokens=17"]
    answered = train(words, command="predict")
    assert answered.code == 0, answered.err
    with out.open() as file:
        (row,) = csv.DictReader(file)
    assert row["prompt"] == "größer"
    assert set(row["prediction"]) <= set("größer als. \ufffd")


def test_tokens_go_on_exactly(train, tmp_path):
    text = tmp_path / "book.txt"
    text.write_text("to be or not to be, that is the question. " * 200)
    model = ["model.dim=16", "model.depth=1", "model.heads=2", "model.context=32"]
    job = ["experiment=char_lm", "data=tokens", f"data.root={text}", "data.context=32", *model]
    job += [*SHORT, "trainer.log_every_n_steps=3"]
    whole, halves = tmp_path / "whole", tmp_path / "halves"
    assert train([*job, f"run_dir={whole}"]).code == 0
    assert train([*job, f"run_dir={halves}", "trainer.max_steps=7"]).code == 0
    done = train([*job, f"run_dir={halves}", "resume=auto", "loader.num_workers=2"])
    assert done.code == 0, done.err
    after = [line for line in log_of(halves) if line["step"] > 9]
    assert after == [line for line in log_of(whole) if line["step"] > 9]


@pytest.mark.skipif(
    importlib.util.find_spec("transformers") is None,
    reason="the extra transformers is not installed",
)
def test_a_language_model_of_transformers_trains(train, tmp_path):
    text = tmp_path / "book.txt"
    text.write_text("to be or not to be, that is the question. " * 100)
    tiny = "{n_embd: 16, n_layer: 1, n_head: 2, n_positions: 32}"
    done = train(
        [
            "experiment=char_lm",
            "data=tokens",
            f"data.root={text}",
            "data.context=32",
            "model=transformers",
            "model.name=gpt2",
            "model.auto=AutoModelForCausalLM",
            f"model.config={tiny}",
            "optimizer=adamw",
            "optimizer.lr=0.01",
            *SHORT,
            f"run_dir={tmp_path / 'run'}",
        ]
    )
    assert done.code == 0, done.err
    losses = [
        line["train/epoch_loss"] for line in log_of(tmp_path / "run") if "train/epoch_loss" in line
    ]
    assert losses[-1] < losses[0] < 5.6  # it begins at log(256)
