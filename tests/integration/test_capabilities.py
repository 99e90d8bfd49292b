"""What an experiment may also ask for: several validation sets, a micro-batch that fits, regions,
a mixture, a mirror of the run."""

import contextlib
import json

import pytest
import torch
import yaml
from torch import nn

from regimen.conf.check import parse
from regimen.conf.errors import ConfigError
from regimen.scripts.composition.compose import compose
from regimen.trainer.assembly import accumulation
from regimen.trainer.assembly.accumulation import find_accumulation_steps
from regimen.trainer.assembly.check import check_targets
from regimen.trainer.assembly.experiment import build
from regimen.trainer.errors import ResourceError, StorageError
from regimen.trainer.runs.remote import Remote
from regimen.trainer.strategies.strategy import Strategy
from regimen.trainer.update.updater import Updater
from same_run import differences

SHORT = ["experiment=resnet18", "model=mlp", "trainer.max_epochs=1", "callbacks=none"]
SETS = (
    "data.val={clean: {_target_: regimen.data.sources.Digits, split: val, image_size: 16}, "
    "hard: {_target_: regimen.data.sources.Digits, split: test, image_size: 16}}"
)
MIB = 2**20


def config_of(*words):
    return parse(compose([*SHORT, *words]).config)


def test_each_validation_set_has_its_metrics_and_the_first_is_monitored():
    trainer = build(config_of(SETS)).trainer
    trainer.fit()
    for stage, other in (("val/clean", "data.test=null"), ("val/hard", "data.val=${data.test}")):
        alone = build(config_of(other)).trainer
        alone.fit()
        for name in ("loss", "accuracy"):
            assert trainer.metrics[f"{stage}/{name}"] == alone.metrics[f"val/{name}"]
    assert "val/loss" not in trainer.metrics


TESTS = SETS.replace("data.val=", "data.test=")


def test_each_test_set_has_its_metrics_wherever_it_is_tested(train, evaluated, tmp_path):
    runs = {name: tmp_path / name for name in ("several", "clean", "hard")}
    words = ["experiment=resnet18", "model=mlp", "trainer.max_epochs=1", "loader.num_workers=0"]
    known = {"several": TESTS, "clean": "data.test=${data.val}", "hard": "data.fold=null"}
    found = {}
    for name, run in runs.items():
        done = train([*words, known[name], f"run_dir={run}"])
        found[name] = json.loads((run / "status.json").read_text())["results"]
        assert "no test split" not in done.out
    expected = {
        f"test/{name}/{metric}": found[name][f"test/{metric}"]
        for name in ("clean", "hard")
        for metric in ("loss", "accuracy")
    }
    tested = {k: v for k, v in found["several"].items() if k.startswith("test/")}
    assert tested == expected
    again = evaluated(runs["several"])
    assert again.pop("split") == "test"
    assert {k: again[k] for k in expected} == pytest.approx(expected)
    one = evaluated(runs["several"], "split=test/hard")
    assert {k for k in one if k.startswith("test/")} == {"test/hard/loss", "test/hard/accuracy"}
    told = train([f"run={runs['several']}", "split=test/other"], 2, command="evaluate").error
    assert "try split=val or test/clean or test/hard" in told
    table = tmp_path / "p.csv"
    train([f"run={runs['several']}", "source=test/clean", f"out={table}"], command="predict")
    assert len(table.read_text().splitlines()) == 1 + 270


@pytest.mark.parametrize(
    ("words", "key", "said"),
    [
        pytest.param(
            ["data.test={a: {_target_: regimen.data.sources.Digits, splitt: val}}"],
            "data.test.a.splitt",
            "split",
            id="an argument of a test set",
        ),
        pytest.param(
            ["data.test={a: {split: val}}", "~data.test._target_"],
            "data.test.a._target_",
            "missing",
            id="a test set without a target",
        ),
        pytest.param(
            ["callbacks=default", "callbacks.checkpoint.monitor=val/loss", SETS],
            "callbacks.checkpoint.monitor",
            "val/clean/loss",
            id="a monitor that no set has",
        ),
        pytest.param(
            ["data.val={a/b: {_target_: regimen.data.sources.Digits, split: val}}"],
            "data.val.a/b",
            "without /",
            id="a slash in a set's name",
        ),
        pytest.param(
            ["trainer.compile={regions: [Linaer]}"],
            "trainer.compile.regions",
            "there are",
            id="a region that no module is",
        ),
        pytest.param(
            ["data=mixture", "data.train.weights.b=0"],
            "data.train.weights.b",
            "above 0",
            id="a weight of 0",
        ),
        pytest.param(
            ["data=mixture", "loader.sampler={_target_: regimen.data.orders.Subset, size: 9}"],
            "loader.sampler",
            "a mixture",
            id="a sampler beside a mixture",
        ),
    ],
)
def test_mistakes_are_found_before_a_run(words, key, said):
    with pytest.raises(ConfigError) as caught:
        check_targets(config_of(*words))
    told = [str(problem) for problem in caught.value.problems if problem.key == key]
    assert len(told) == 1
    assert said in told[0]


def test_regions_are_compiled_by_themselves_and_train_the_same():
    compiling = "trainer.compile={regions: [Linear], backend: eager}"
    runs = [build(config_of(*more)).trainer for more in ([], [compiling])]
    for trainer in runs:
        trainer.fit()
    assert all(map(torch.equal, *(list(t.model.state_dict().values()) for t in runs)))
    layers = [m for m in runs[1].model.modules() if m._compiled_call_impl is not None]
    assert layers
    assert all(isinstance(layer, nn.Linear) for layer in layers)


def test_as_many_micro_batches_as_memory_asks_for_and_no_trace_of_the_trial(monkeypatch):
    taken = []  # MiB by the samples of a micro-batch: 100 for each

    def peak():
        return 100 * MIB * taken[-1]

    def tried(config, strategy, real=accumulation._tried):
        taken.append(-(-config.loader.batch_size // config.trainer.micro_batches))
        return real(config, strategy)

    monkeypatch.setattr(accumulation, "peak_rss", peak)
    monkeypatch.setattr(accumulation, "_tried", tried)
    auto = "trainer.gradient_accumulation_steps=auto"
    words = ["loader.batch_size=30", "trainer.max_steps=2"]
    assert find_accumulation_steps(config_of(*words, auto), Strategy("cpu")) == 1
    assert (
        find_accumulation_steps(config_of(*words, auto, "trainer.memory_limit=1"), Strategy("cpu"))
        == 4
    )
    assert taken[1:] == [30, 15, 8]
    with pytest.raises(ResourceError, match=r"one sample does not fit: \(.*\[1, 1, 16, 16\]"):
        find_accumulation_steps(
            config_of(*words, auto, "trainer.memory_limit=0.01"), Strategy("cpu")
        )
    whole, parts = (
        build(
            config_of(*words, f"trainer.gradient_accumulation_steps={n}", "trainer.precision=fp64")
        )
        for n in (1, 4)
    )
    for run in (whole, parts):
        run.trainer.fit()
    for one, other in zip(
        whole.trainer.model.parameters(), parts.trainer.model.parameters(), strict=True
    ):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-12)


def test_with_cuda_graphs_no_second_micro_batch_is_tried(monkeypatch):
    monkeypatch.setattr(accumulation, "_tried", lambda config, strategy: ("memory", []))
    words = ["trainer.gradient_accumulation_steps=auto", "trainer.compile={mode: reduce-overhead}"]
    with pytest.raises(ResourceError, match=r"the graphs .*trainer\.compile=true"):
        find_accumulation_steps(config_of(*words), Strategy("cpu"))


def test_what_a_trial_raises_beside_memory_is_raised(monkeypatch):
    def fail(self, micro_batches):
        raise RuntimeError(said)

    monkeypatch.setattr(Updater, "dry_run_backward", fail)
    auto = "trainer.gradient_accumulation_steps=auto"
    said = "DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes"
    with pytest.raises(ResourceError, match="one sample does not fit"):
        find_accumulation_steps(config_of("loader.batch_size=2", auto), Strategy("cpu"))
    said = "something else"
    with pytest.raises(RuntimeError, match="something else"):
        find_accumulation_steps(config_of("loader.batch_size=2", auto), Strategy("cpu"))


@pytest.mark.slow
def test_the_number_that_was_found_stands_in_the_run_and_stays(train, tmp_path):
    words = [*SHORT, "callbacks=default", "trainer.gradient_accumulation_steps=auto"]
    run = tmp_path / "run"
    train([*words, f"run_dir={run}"])
    stored = yaml.safe_load((run / "config.yaml").read_text())
    assert stored["trainer"]["gradient_accumulation_steps"] == 1
    words.append("trainer.memory_limit=0.001")  # which no trial would keep

    train([*words, "trainer.max_epochs=2", f"run_dir={run}", "resume=auto"])

    assert "one sample does not fit" in train(words, code=8).error


@pytest.mark.slow
def test_a_run_goes_on_from_its_mirror_as_if_it_had_not_moved(train, start, tmp_path):
    words = [*SHORT, "callbacks.checkpoint.every_n_steps=7", "trainer.max_epochs=4"]
    whole = tmp_path / "whole"
    moved = tmp_path / "moved"
    copy = tmp_path / "copy"
    mirrored = ["callbacks=[default,mirror]", f"callbacks.mirror.to=file://{copy}"]
    train([*words, "callbacks=default", f"run_dir={whole}"])
    begun = start([*words, *mirrored, f"run_dir={tmp_path / 'begun'}"])
    begun.until((copy / "checkpoints/index.json").exists)
    begun.kill()
    words += ["callbacks=default", f"resume=file://{copy}"]  # a mirror is no part of the training
    train([*words, f"run_dir={moved}"])
    assert differences(whole, moved) == []
    refused = train([*words, f"run_dir={moved}"], code=2)
    assert "holds a run already" in refused.error
    unknown = train([*SHORT, f"run_dir={tmp_path / 'new'}", "resume=nothing://x"], code=2)
    assert "resume: nothing://x cannot be opened" in unknown.error
    assert not (tmp_path / "new").exists()
    words = [*SHORT, "callbacks=[default,mirror]", "callbacks.mirror.to=file:///proc/nowhere"]
    dead = train(words, code=7)
    assert "cannot write to file:///proc/nowhere" in dead.error


class DiedError(Exception):
    """The machine is gone."""


@contextlib.contextmanager
def dying(files, moment):
    """Let a file system die at its call number `moment` that changes something."""
    calls = iter(range(moment))

    def mortal(work):
        def call(*given, **more):
            if next(calls, None) is None:
                raise DiedError
            return work(*given, **more)

        return call

    with pytest.MonkeyPatch.context() as patch:
        for name in ("pipe_file", "put_file", "mv", "rm_file"):
            patch.setattr(files, name, mortal(getattr(files, name)))
        yield


@pytest.mark.parametrize("address", ["memory://run", "file://{}/there"])
def test_a_copy_that_ends_at_any_moment_leaves_the_run_before_or_after(address, tmp_path):
    folder = tmp_path / "run"
    remote = Remote(address.format(tmp_path))
    checkpoints = folder / "checkpoints"
    checkpoints.mkdir(parents=True)
    (folder / "manifest.json").write_text("{}")

    def saved(step):
        name = f"step-{step:08}.pt"
        path = checkpoints / name
        path.write_bytes(b"x" * step)
        (folder / "metrics.jsonl").write_text("line\n" * step)
        index = {"files": {name: {}}, "names": {"last": {"file": name}}}
        (checkpoints / "index.json").write_text(json.dumps(index))

    moment = 0
    whole = False
    while not whole:
        saved(2 * moment + 1)
        remote.send(folder)
        saved(2 * moment + 2)
        with contextlib.suppress(DiedError), dying(remote.files, moment):
            remote.send(folder)
            whole = True
        found = tmp_path / f"found{moment}"
        remote.fetch(found)
        index = json.loads((found / "checkpoints/index.json").read_text())
        (name,) = index["files"]
        step = int(name.removeprefix("step-").removesuffix(".pt"))
        if whole:
            assert step == 2 * moment + 2
        else:
            assert step in (2 * moment + 1, 2 * moment + 2)
        assert (found / "checkpoints/last.pt").read_bytes() == b"x" * step
        assert (found / "metrics.jsonl").read_text().count("\n") >= step
        moment += 1
    assert moment > 4
    with pytest.raises(StorageError, match="cannot read the run"):
        Remote(f"{address.format(tmp_path)}/elsewhere").fetch(tmp_path / "none")
