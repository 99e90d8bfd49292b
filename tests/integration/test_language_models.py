"""`train experiment=chat` from folders of a model and of conversations, to a run that is whole."""

import pytest
import torch

pytest.importorskip("peft", reason="the extra peft is not installed")

from regimen.scripts.convert import convert
from same_run import logged, state_of
from toy_chat import conversations, write_model, write_rows

FEW = [
    *("data.context=128", "loader.batch_size=8", "trainer.max_epochs=2"),
    *("trainer.log_every_n_steps=1", "callbacks.checkpoint.every_n_steps=3"),
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
    split = f"trainer.gradient_accumulation_steps={steps}"
    train(line(folders, tmp_path / "run", "trainer.precision=fp64", split))
    assert losses(tmp_path / "run") == pytest.approx(losses(trained), rel=1e-12)
    other = weights(tmp_path / "run")
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
    begun = f"resume={trained / 'checkpoints/step-00000003.pt'}"
    train(line(folders, run, "trainer.precision=fp64", begun))
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
