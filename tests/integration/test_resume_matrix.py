"""A resumed run ends as one that was never interrupted, whatever has a state."""

import os
import shutil

import pytest
import torch

from same_run import differences, metrics_of, repeated_steps

# Two epochs of 8 updates, the last of them short: many runs in little time.
OWN = """
from data.sources import Digits


class Few(Digits):
    def __len__(self):
        return 500
"""
UPDATES = 16
EVERY_STEP = [
    "data.train._target_=own.Few",  # which alone would drop the other splits
    "data.val._target_=data.sources.Digits",
    "data.test._target_=data.sources.Digits",
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
    "gpu-sgd": [],
    "gpu-adamw-swa": ["optimizer=adamw", "callbacks=[default,swa]", "trainer.clip_grad_norm=1.0"],
}


@pytest.fixture(scope="module")
def train(train, as_on_a_gpu, tmp_path_factory):
    """Run `train ARGUMENTS`, a variant that begins with `gpu` as on one."""
    folder = tmp_path_factory.mktemp("cwd")
    (folder / "own.py").write_text(OWN)

    def run(arguments, name=""):
        environment = as_on_a_gpu if name.startswith("gpu") else {}
        return train(arguments, folder=folder, environment=environment)

    return run


@pytest.fixture(scope="module")
def finished(train, job, tmp_path_factory):
    """Return a function that trains a variant, once, keeping the checkpoint of every update."""
    runs = {}

    def get(name):
        if name not in runs:
            path = tmp_path_factory.mktemp("runs") / name
            run = train([*job, *EVERY_STEP, *VARIANTS[name], f"run_dir={path}"], name)
            assert run.code == 0, run.err
            runs[name] = path
        return runs[name]

    return get


def steps_of(run):
    return sorted(int(p.stem.removeprefix("step-")) for p in run.glob("checkpoints/step-*.pt"))


def killed_at(run, step, target):
    """Copy a run as a kill -9 would have left it after the checkpoint of `step`, logs and all."""
    shutil.copytree(run, target)
    folder = target / "checkpoints"
    for later in steps_of(run):
        if later > step:
            (folder / f"step-{later:08d}.pt").unlink()
    for name in ("last.pt", "best.pt", "index.json"):
        (folder / name).unlink(missing_ok=True)
    newest = torch.load(folder / f"step-{step:08d}.pt", weights_only=True)
    for best, _ in newest["callbacks"]["checkpoint"]["ranking"][:1]:
        os.link(folder / f"step-{best:08d}.pt", folder / "best.pt")
    status = target / "status.json"
    status.write_text(status.read_text().replace('"finished"', '"running"'))
    return target


def resumed(train, job, name, run, but=()):
    overrides = [*VARIANTS[name], *but]
    result = train([*job, *EVERY_STEP, *overrides, f"run_dir={run}", "resume=auto"], name)
    assert result.code == 0, result.err
    return run


@pytest.mark.slow
@pytest.mark.parametrize("name", list(VARIANTS))
def test_the_end_is_the_same(train, job, finished, tmp_path, name):
    whole = finished(name)
    steps = steps_of(whole)
    # In the middle of an epoch, and where one ended.
    for step in (steps[len(steps) // 4], steps[len(steps) // 2 - 1]):
        run = killed_at(whole, step, tmp_path / str(step))
        workers = ["loader.num_workers=0"] if name == "workers-to-0" else []
        resumed(train, job, name, run, workers)
        assert differences(whole, run, but=["config"] if workers else []) == [], f"from step {step}"
        assert repeated_steps(run) == []


@pytest.mark.slow
def test_the_variants_are_what_they_are_called(finished):
    assert steps_of(finished("dropout-ema"))[-1] == UPDATES
    assert "train/skipped_updates" in str(metrics_of(finished("fp16-overflow")))
    assert steps_of(finished("early-stopping"))[-1] < UPDATES
    rates = {line for line in metrics_of(finished("plateau")).values() if "lr/" in line}
    assert len({line.split('"lr/default": ')[1].split(",")[0] for line in rates}) > 1


def take_over(part):
    def change(content, earlier):
        content[part] = earlier[part]

    return change


def drop_buffers(content, earlier):
    for name, value in earlier["model"].items():
        if "running" in name:
            content["model"][name] = value


def shift_position(content, earlier):
    content["state"]["counters"]["position"] += 1


def drop_sums(content, earlier):
    content["state"]["sums"] = earlier["state"]["sums"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "forget",
    [
        pytest.param(take_over("rng"), id="rng"),
        pytest.param(take_over("optimizer"), id="optimizer"),
        pytest.param(take_over("lr_scheduler"), id="lr_scheduler"),
        pytest.param(take_over("ema"), id="ema"),
        pytest.param(drop_buffers, id="buffers"),
        pytest.param(shift_position, id="position"),
        pytest.param(drop_sums, id="sums"),
    ],
)
def test_what_a_checkpoint_forgot_would_be_noticed(train, job, finished, tmp_path, forget):
    whole = finished("dropout-ema")
    run = killed_at(whole, 7, tmp_path / "run")
    path = run / "checkpoints" / "step-00000007.pt"
    content = torch.load(path, weights_only=True)
    earlier = torch.load(path.with_name("step-00000005.pt"), weights_only=True)
    forget(content, earlier)
    torch.save(content, path)
    resumed(train, job, "dropout-ema", run)
    assert differences(whole, run)
