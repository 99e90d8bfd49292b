"""`train experiment=glue` and `experiment=tags`, from folders of texts to answers beside texts."""

import json
import re

import pytest
import torch

pytest.importorskip("transformers", reason="the extra transformers is not installed")
pytest.importorskip("seqeval", reason="the extra entities is not installed")

from regimen import load_run
from same_run import logged, state_of
from toy_texts import pairs, sentences, write_bert, write_jsonl, write_table

FEW = [
    "data.length=64",
    "loader.batch_size=8",
    "trainer.max_epochs=3",
    "optimizer.lr=1e-2",
    "trainer.log_every_n_steps=1",
    "callbacks.checkpoint.every_n_steps=4",
    "callbacks.checkpoint.save_top_k=-1",
    "trainer.precision=fp64",
]
WAYS = {
    "padded to one length": ["data.padding=max_length"],
    "micro-batches": ["trainer.gradient_accumulation_steps=4", "data.padding=max_length"],
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("texts")
    write_bert(root / "bert")
    write_table(root / "glue/train.csv", pairs(44))
    write_table(root / "glue/val.csv", pairs(12, 44))
    write_jsonl(root / "tags/train.jsonl", sentences(44))
    write_jsonl(root / "tags/val.jsonl", sentences(12, 44))
    write_jsonl(root / "tags/test.jsonl", sentences(6, 56))
    return root


def line(folders, name, run, *more):
    line = [f"experiment={name}", f"data.root={folders / name}", f"model.name={folders / 'bert'}"]
    if name == "glue":
        line.append("data.input=[premise,hypothesis]")
    return [*line, *FEW, f"run_dir={run}", *more]


@pytest.fixture(scope="module", params=["glue", "tags"])
def trained(request, train, folders):
    run = folders / f"run-{request.param}"
    train(line(folders, request.param, run))
    return request.param, run


def weights(run):
    return torch.load(run / "checkpoints/last.pt", weights_only=True)["model"]


def losses(run):
    return [entry["train/loss"] for entry in logged(run) if "train/loss" in entry]


def validations(run):
    return [
        {key: value for key, value in entry.items() if key.startswith("val/")}
        for entry in logged(run)
        if "val/loss" in entry
    ]


def assert_same(run, other):
    assert losses(other) == pytest.approx(losses(run), rel=1e-12)
    for one, two in zip(validations(run), validations(other), strict=True):
        assert one == pytest.approx(two, rel=1e-12)
    found = weights(other)
    for name, value in weights(run).items():
        torch.testing.assert_close(found[name], value, rtol=0, atol=1e-12)


@pytest.mark.parametrize("way", WAYS)
def test_neither_padding_nor_micro_batches_change_anything(train, folders, trained, tmp_path, way):
    name, run = trained
    train(line(folders, name, tmp_path / "run", *WAYS[way]))
    assert_same(run, tmp_path / "run")


@pytest.mark.slow
def test_two_processes_change_nothing(train, folders, trained, tmp_path):
    name, run = trained
    train(line(folders, name, tmp_path / "run", "strategy=ddp", "strategy.devices=2"))
    assert_same(run, tmp_path / "run")


def test_a_resume_in_mid_epoch_is_exact(train, folders, trained, tmp_path):
    name, run = trained
    checkpoint = run / "checkpoints/step-00000004.pt"

    train(line(folders, name, tmp_path / "run", f"resume={checkpoint}"))

    assert state_of(tmp_path / "run") == state_of(run)


def test_an_evaluation_repeats_the_last_validation(evaluated, trained):
    _, run = trained
    found = evaluated(run, "split=val", "checkpoint=last")
    for key, value in validations(run)[-1].items():
        assert found[key] == value


@pytest.mark.parametrize("kind", ["class", "number"])
def test_without_labels_nothing_is_measured(train, evaluated, folders, tmp_path, kind):
    data = tmp_path / "data"
    rows = [{**row, "label": number % 2} for number, row in enumerate(pairs(16))]
    write_jsonl(data / "train.jsonl", rows)
    write_jsonl(data / "test.jsonl", [{**row, "label": -1} for row in rows[:3]])
    more = [
        f"data.root={data}",
        "trainer.max_steps=1",
        f"data.target_kind={kind}",
        "data.num_classes=2",
    ]
    if kind == "number":
        more[-1] = "data.num_classes=1"
        more.append("task=regression")
    run = tmp_path / "run"

    plan = train(line(folders, "glue", run, *more, "dry_run=true"))
    assert "does not return it" not in plan.out
    done = train(line(folders, "glue", run, *more))

    assert "no label of the test split counts: there are no figures" in done.out
    assert "no label counts in test" in done.err
    for entry in logged(run):
        assert not any(name.startswith("test/") for name in entry)
    results = json.loads((run / "status.json").read_text())["results"]
    assert "val/loss" in results
    assert not any(name.startswith("test/") for name in results)
    assert evaluated(run) == {"checkpoint": "best", "split": "test"}


def answers(train, run, source, out):
    train([f"run={run}", f"source={source}", f"out={out}"], command="predict")
    return [json.loads(text) for text in out.read_text().splitlines()]


def test_answers_stand_beside_the_texts(train, folders, trained, tmp_path):
    name, run = trained
    rows = answers(train, run, "val", tmp_path / "val.jsonl")
    if name == "glue":
        given = pairs(12, 44)
        kept = ["premise", "hypothesis"]
        new = write_table(tmp_path / "new.csv", [{key: row[key] for key in kept} for row in given])
        assert {row["prediction"] for row in rows} <= {"other", "same"}
    else:
        given = sentences(12, 44)
        kept = ["words"]
        new = write_jsonl(tmp_path / "new.jsonl", [{"words": row["words"]} for row in given])
        right = sum(row["prediction"] == one["tags"] for row, one in zip(rows, given, strict=True))
        assert all(len(row["prediction"]) == len(row["words"]) for row in rows)
        assert right >= 8
    for row, one in zip(rows, given, strict=True):
        assert [*row][: len(kept) + 1] == ["file", *kept]
        assert {key: row[key] for key in kept} == {key: one[key] for key in kept}

    # The same texts without labels, from a file and from Python.
    again = answers(train, run, new, tmp_path / "new-answers.jsonl")
    drop_file = [{key: row[key] for key in row if key != "file"} for row in rows]
    assert [{key: row[key] for key in row if key != "file"} for row in again] == drop_file
    assert (
        load_run(run, "cpu").predict([{key: one[key] for key in kept} for one in given])
        == drop_file
    )


def test_the_plan_counts_the_texts(train, folders, tmp_path):
    plan = train(line(folders, "tags", tmp_path / "run", "dry_run=true")).out
    told = r"data\.train: 44 texts of 6 to \d+ tokens, padded to the longest of a micro-batch"
    assert re.search(told, plan)
    assert "predict cannot ask" not in plan


def test_mistakes_start_nothing(train, folders, tmp_path):
    write_jsonl(tmp_path / "pos/train.jsonl", [{"words": ["anna"], "tags": ["NOUN"]}] * 9)
    cases = {
        f"data.root={tmp_path / 'pos'}": (2, "set task.entities=false"),
        "data.length=9": (3, "train.jsonl:2: 10 tokens are more"),
        "data.padding=none": (2, "padding"),
    }
    for override, (code, named) in cases.items():
        run = train(line(folders, "tags", tmp_path / "run", override), code)
        assert named in run.err
        assert not (tmp_path / "run").exists()


OWN_CODE = """
import os, pathlib
pathlib.Path(os.environ["RAN"]).touch()
from transformers import BertConfig, BertForSequenceClassification
class OwnConfig(BertConfig):
    model_type = "own"
class Own(BertForSequenceClassification):
    config_class = OwnConfig
"""


@pytest.mark.slow
def test_code_of_a_model_runs_where_the_command_line_says_so(train, evaluated, folders, tmp_path):
    folder = write_bert(tmp_path / "own")
    config = json.loads((folder / "config.json").read_text())
    names = {"AutoConfig": "own.OwnConfig", "AutoModelForSequenceClassification": "own.Own"}
    config |= {"model_type": "own", "auto_map": names}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "own.py").write_text(OWN_CODE)
    ran = tmp_path / "ran"
    run = tmp_path / "run"
    given = line(folders, "glue", run, f"model.name={folder}", "trainer.max_epochs=1")
    environment = {"RAN": str(ran), "HF_MODULES_CACHE": str(tmp_path / "cache")}

    refused = train(given, 2, environment=environment)
    assert "--allow-remote-code on the command line runs it" in refused.error
    assert not ran.exists()
    train([*given, "--allow-remote-code"], environment=environment)
    assert ran.exists()
    # It is no part of the configuration: each command asks for it.
    assert "remote_code" not in (run / "config.yaml").read_text()
    ran.unlink()
    out = f"out={tmp_path / 'answers.csv'}"
    again = [f"run={run}", "source=val", out]
    train(again, 2, command="predict", environment=environment)
    assert not ran.exists()
    train([*again, "--allow-remote-code"], command="predict", environment=environment)
    two = ["strategy=ddp", "strategy.devices=2", "trainer.max_epochs=2", "resume=auto"]
    train([*given, *two, "--allow-remote-code"], environment=environment)
