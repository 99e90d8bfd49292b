"""A run that was stopped, killed or gone back in ends as one that never was."""

import json
import os
import shlex
import shutil
import signal
from pathlib import Path

import pytest
import torch

from same_run import differences, logged, metrics_of, repeated_steps
from soak import soak
from toy_runs import step_file

EVERY_STEP = [
    "data.train._target_=users.Few",  # which alone would drop the other splits
    "data.val._target_=regimen.data.sources.Digits",
    "data.test._target_=regimen.data.sources.Digits",
    "callbacks.checkpoint.every_n_steps=1",
    "trainer.validate_every_n_steps=3",
]
VARIANTS = {
    "dropout-ema": [],
    "workers-to-0": ["loader.num_workers=2"],
    "fp16-overflow": [
        "trainer.precision=fp16",
        "task/loss=weighted_sum",
        "task.loss.cross_entropy.weight=300",  # too much for the first loss scales
        "optimizer.lr=0.0003",
        "trainer.clip_grad_norm=1.0",
    ],
    "plateau": ["lr_scheduler=plateau", "lr_scheduler.patience=0", "lr_scheduler.threshold=0.5"],
    "early-stopping": [
        "callbacks.early_stopping.patience=3",
        "callbacks.early_stopping.min_delta=0.9",
    ],
    "mixup": ["transforms=mixup"],
    "repeated-augmentation": ["+loader/sampler=repeated", "transforms=shift"],
    "accumulation": ["trainer.gradient_accumulation_steps=3"],
    "unfreeze": [
        "callbacks=[default,unfreeze]",
        "callbacks.unfreeze.stages.layer4=null",
        "callbacks.unfreeze.stages.body={pattern: 'features.[01].*', epoch: 1}",
    ],
    "muon": ["optimizer=muon"],
    "swa": ["callbacks=[default,swa]"],
    "pruning-ema": ["callbacks=[default,ema,pruning]", "callbacks.pruning.every_n_steps=2"],
    "qat": ["callbacks=[default,qat]", "callbacks.qat.start_step=3"],
    "streamed-metrics": ["trainer.log_every_n_steps=7", "trainer.validate_every_n_steps=null"],
    "noise": ["trainer.gradient_noise={eta: 0.01, gamma: 0.55}"],
    "gpu-sgd": [],
    "gpu-adamw-swa": ["optimizer=adamw", "callbacks=[default,swa]", "trainer.clip_grad_norm=1.0"],
}


@pytest.fixture(scope="module")
def variant(train, job, tmp_path_factory):
    """Train a variant in a run directory, one that begins with `gpu` as on one."""
    folder = tmp_path_factory.mktemp("cwd")
    shutil.copy(Path(__file__).with_name("user_code.py"), folder / "users.py")

    def run(name, path, *more):
        environment = {"TRAIN_AS_ON_A_GPU": "1"} if name.startswith("gpu") else {}
        words = [*job, *EVERY_STEP, *VARIANTS[name], f"run_dir={path}", *more]
        train(words, folder=folder, environment=environment)

    return run


@pytest.fixture(scope="module")
def finished(variant, tmp_path_factory):
    """Return a function that trains a variant, once, keeping the checkpoint of every update."""
    runs = {}

    def get(name):
        if name not in runs:
            runs[name] = tmp_path_factory.mktemp("runs") / name
            variant(name, runs[name])
        return runs[name]

    return get


def steps_of(run):
    return sorted(int(p.stem.removeprefix("step-")) for p in run.glob("checkpoints/step-*.pt"))


def killed_at(run, step, target):
    """Copy a run as a kill -9 would have left it after the checkpoint of `step`, logs and all."""
    shutil.copytree(run, target)
    for later in steps_of(run):
        if later > step:
            step_file(target, later).unlink()
    for name in ("last.pt", "best.pt", "index.json"):
        (target / "checkpoints" / name).unlink(missing_ok=True)
    newest = torch.load(step_file(target, step), weights_only=True)
    for best, _ in newest["callbacks"]["checkpoint"]["ranking"][:1]:
        os.link(step_file(target, best), target / "checkpoints" / "best.pt")
    status = target / "status.json"
    status.write_text(status.read_text().replace('"finished"', '"running"'))
    return target


@pytest.mark.slow
@pytest.mark.parametrize("name", list(VARIANTS))
def test_the_end_is_the_same(variant, finished, tmp_path, name):
    whole = finished(name)
    steps = steps_of(whole)
    # In the middle of an epoch, and where one ended.
    for step in (steps[len(steps) // 4], steps[len(steps) // 2 - 1]):
        run = killed_at(whole, step, tmp_path / str(step))
        workers = ["loader.num_workers=0"] if name == "workers-to-0" else []
        variant(name, run, "resume=auto", *workers)
        assert differences(whole, run, but=["config"] if workers else []) == [], f"from step {step}"
        assert repeated_steps(run) == []


@pytest.mark.slow
def test_the_variants_are_what_they_are_called(finished):
    assert steps_of(finished("dropout-ema"))[-1] == 16
    assert "train/skipped_updates" in str(metrics_of(finished("fp16-overflow")))
    assert steps_of(finished("early-stopping"))[-1] < 16
    rates = {line for line in metrics_of(finished("plateau")).values() if "lr/" in line}
    assert len({line.split('"lr/default": ')[1].split(",")[0] for line in rates}) > 1


def an_update_further(content, _):
    """Let the place be behind update 8, not 7 of the epoch."""
    counters = content["state"]["counters"]
    size = counters["epoch_samples"] // counters["position"]
    counters["position"] += 1
    counters["epoch_samples"] += size


FORGET = {
    "buffers": lambda content, earlier: content["model"].update(
        {name: value for name, value in earlier["model"].items() if "running" in name}
    ),
    "position": an_update_further,
    "sums": lambda content, earlier: content["state"].update(sums=earlier["state"]["sums"]),
}


@pytest.mark.slow
@pytest.mark.parametrize("part", ["rng", "optimizer", "lr_scheduler", "ema", *FORGET])
def test_what_a_checkpoint_forgot_would_be_noticed(variant, finished, tmp_path, part):
    whole = finished("dropout-ema")
    run = killed_at(whole, 7, tmp_path / "run")
    path = step_file(run, 7)
    content, earlier = (torch.load(step_file(whole, n), weights_only=True) for n in (7, 5))
    if part in FORGET:
        FORGET[part](content, earlier)
    else:
        content[part] = earlier[part]
    torch.save(content, path)
    variant("dropout-ema", run, "resume=auto")
    assert differences(whole, run)


@pytest.fixture
def copy(whole, tmp_path):
    """A finished run of 40 steps, to be gone back in."""
    return shutil.copytree(whole, tmp_path / "copy")


def test_going_back_and_on_ends_where_the_run_had_ended(train, job, whole, copy):
    run = train([*job, f"resume={step_file(copy, 10)}"])
    assert "resumed at step 10" in run.err
    assert "what the run had beyond step 10 is in" in run.err
    assert differences(whole, copy) == []
    assert repeated_steps(copy) == []
    (left,) = (copy / "abandoned").iterdir()
    moved = sorted(path.name for path in (left / "checkpoints").glob("step-*"))
    assert moved == [f"step-{step:08d}.pt" for step in range(15, 45, 5)]
    assert all(line["step"] > 10 for line in logged(left))


@pytest.mark.parametrize("policy", ["override", "keep"])
def test_a_stop_after_going_back_goes_on_by_the_printed_command(
    train, start, job, whole, copy, tmp_path, policy
):
    change = [*job, "optimizer.lr=0.013", f"resume_policy={policy}"]
    undisturbed = shutil.copytree(whole, tmp_path / "undisturbed")
    train([*change, f"resume={step_file(undisturbed, 10)}"])
    stopped = start([*change, f"resume={step_file(copy, 10)}"])
    metrics = copy / "metrics.jsonl"
    left = copy / "abandoned"
    stopped.until(lambda: list(left.glob("*/metrics.jsonl")) and not list(left.glob("*.json")))
    stopped.until(lambda: '"step": 12' in metrics.read_text())
    stopped.send(signal.SIGTERM)
    command = shlex.split(stopped.wait(143).error.partition("go on with: ")[2])
    again = train(command[1:])
    assert "already finished" not in again.err
    assert differences(undisturbed, copy) == []
    rates = {line["step"]: line["lr/default"] for line in logged(copy) if "lr/default" in line}
    assert (rates[12] < 0.02) == (policy == "override")


def test_a_new_run_from_anothers_checkpoint_has_its_own_ranking_and_files(
    train, job, copy, tmp_path
):
    before = {path: path.read_bytes() for path in copy.rglob("*") if path.is_file()}
    new = tmp_path / "new"
    run = train([*job, f"resume={step_file(copy, 30)}", f"run_dir={new}"])
    assert {path: path.read_bytes() for path in before} == before
    best = json.loads((new / "checkpoints" / "index.json").read_text())["names"]["best"]
    assert best["step"] > 30
    assert (new / "checkpoints" / "best.pt").exists()
    assert min(line["step"] for line in logged(new)) > 30
    assert "lost" not in run.err
    assert not (new / "abandoned").exists()


@pytest.mark.slow
def test_kills_at_any_moment_lose_nothing(tmp_path):
    tally = soak(tmp_path, kills=3, seed=1)
    assert len(tally.steps) == 3
    assert tally.loads_of_last > 0
    assert tally.steps == sorted(tally.steps)
    controls(tmp_path)


def controls(folder):
    """Show that the comparison sees each kind of loss; a blind one would prove nothing."""
    whole = folder / "whole"
    killed = folder / "killed"
    assert differences(whole, killed) == []
    for name, spoil in {
        "buffers": lambda c: c["model"]["features.0.bn.running_mean"].add_(1e-6),
        "weights": lambda c: c["model"]["head.weight"].view(-1)[3].mul_(1 + 1e-6),
        "rng": lambda c: c["rng"][0]["torch"].__setitem__(5, c["rng"][0]["torch"][5] ^ 1),
        "position": lambda c: c["state"]["counters"].update(updates=1),
        "ema": lambda c: c.update(ema={}),
    }.items():
        copy = folder / name
        shutil.copytree(killed, copy)
        last = copy / "checkpoints" / "last.pt"
        content = torch.load(last, weights_only=True)
        spoil(content)
        (copy / "checkpoints" / "index.json").unlink()
        torch.save(content, last)
        assert differences(whole, copy), name
    metrics = killed / "metrics.jsonl"
    lines = metrics.read_text().splitlines()
    metrics.write_text("\n".join([*lines, lines[-1]]) + "\n")
    assert repeated_steps(killed)
    assert any("metrics.jsonl" in text for text in differences(whole, killed))
    changed = {**json.loads(lines[0]), "train/loss": 0.0}
    metrics.write_text("\n".join([json.dumps(changed), *lines[1:]]) + "\n")
    assert any("line 1" in text for text in differences(whole, killed))
