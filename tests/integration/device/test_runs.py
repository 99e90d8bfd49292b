"""Commands on an accelerator: killed and resumed, used afterwards, out of memory, in processes."""

import csv
import json
from dataclasses import replace

import pytest
import torch

from accelerator import CPU, DEVICE, check_same, needs_accelerator, needs_simulation
from regimen import load_run
from regimen.conf.check import parse
from regimen.scripts.composition.compose import compose
from regimen.trainer.assembly.accumulation import _tried, find_accumulation_steps
from regimen.trainer.assembly.experiment import build
from regimen.trainer.assembly.parts import build_strategy
from regimen.trainer.checkpoints.reader import read_checkpoint
from regimen.trainer.device import device_count, spare_memory
from regimen.trainer.errors import ResourceError
from regimen.trainer.strategies.strategy import Strategy
from same_run import differences, logged
from toy_pictures import write_digits

pytestmark = needs_accelerator
FEW = [
    "model.widths=[4,8]",
    "loader.batch_size=128",
    "trainer.precision=fp64",
    "trainer.deterministic=true",
    "callbacks.model_summary=null",
]
ON_CPU = "strategy.accelerator=cpu"
OWN = """
import types
import torch
from regimen.trainer.callback import Callback


class Exhaust(Callback):
    def on_update_start(self, trainer, micro_batches):
        device = trainer.strategy.device
        limit = getattr(torch.get_device_module(device), "set_memory_limit", None)
        if limit is None:
            torch.empty(2**50, device=device)
        else:
            limit(0, 1000)


def illegal(*args):
    raise RuntimeError("SIM error: an illegal address was asked for\\nand more")


def lacking(*args):
    raise NotImplementedError("Could not run 'aten::relu' with arguments from the 'sim' backend.")


def broken(*args):
    raise RuntimeError("simDNN error: SIMDNN_STATUS_EXECUTION_FAILED")


class Fail(Callback):
    fault = illegal

    def on_update_start(self, trainer, micro_batches):
        self.library = torch.library.Library("aten", "IMPL")
        names = {"__name__": "torch"}  # as raised by the operator
        names |= {"RuntimeError": RuntimeError, "NotImplementedError": NotImplementedError}
        fails = types.FunctionType(type(self).fault.__code__, names)
        self.library.impl("relu", fails, "PrivateUse1", allow_override=True)


class Lack(Fail):
    fault = lacking


class Break(Fail):
    fault = broken
"""


def weights(run):
    return read_checkpoint(run / "checkpoints" / "last.pt")["model"]


def killed(start, words, run, step=5):
    """Train until a save, and no further than to the next."""
    started = start([*words, f"run_dir={run}"])
    started.until((run / "checkpoints" / f"step-{step:08d}.pt").exists)
    started.kill()
    assert "finished" not in (run / "status.json").read_text()


@pytest.fixture(scope="module")
def trained(train, job, tmp_path_factory):
    """A finished run with dropout, an average and saves in the background. Do not change it."""
    run = tmp_path_factory.mktemp("runs") / "whole"
    train([*job, *FEW, f"run_dir={run}"])
    return run


@pytest.mark.parametrize(
    "words",
    [
        pytest.param([], id="sgd, EMA"),
        pytest.param(
            [
                "optimizer=adamw",
                "callbacks=[default,swa]",
                "trainer.clip_grad_norm=1.0",
                "loader.num_workers=2",
                "transforms=on_device",
            ],
            id="adamw, SWA, workers",
        ),
    ],
)
def test_killed_and_resumed_it_ends_the_same(train, start, job, trained, tmp_path, words):
    whole = trained
    words = [*job, *words, *FEW]
    if len(words) > len([*job, *FEW]):
        whole = tmp_path / "whole"
        train([*words, f"run_dir={whole}"])
    killed(start, words, tmp_path / "run")
    train([*words, f"run_dir={tmp_path / 'run'}", "resume=auto"])
    assert differences(whole, tmp_path / "run") == []


def test_it_goes_on_on_the_cpu_and_back(train, start, job, tmp_path):
    words = [*job, *FEW, "model.dropout=0"]
    whole = tmp_path / "whole"
    run = tmp_path / "run"
    train([*words, f"run_dir={whole}"])
    killed(start, words, run)
    killed(start, [*words, ON_CPU, "resume=auto"], run, step=10)
    done = train([*words, f"run_dir={run}", "resume=auto"])
    assert "the random state of cpu" in done.err
    torch.testing.assert_close(weights(run), weights(whole), rtol=1e-8, atol=1e-8)


def read_table(path):
    """Return the texts and the numbers of a CSV file's rows."""
    texts = []
    numbers = []
    with path.open(newline="") as file:
        for row in csv.DictReader(file):
            for name, cell in row.items():
                if name.startswith("probability"):
                    numbers.append(float(cell))
                else:
                    texts.append(cell)
    return texts, numbers


def test_what_a_run_is_used_for_afterwards(trained, evaluated, train, tmp_path):
    tested = {k: v for k, v in logged(trained)[-1].items() if k.startswith("test/")}
    again = evaluated(trained)
    assert {key: again[key] for key in tested} == tested
    source = write_digits(tmp_path / "pictures", {"": 1})
    tables = []
    for where in ([], [ON_CPU]):
        words = [f"run={trained}", f"source={source}", f"out={tmp_path}/p.csv", *where]
        train(words, command="predict")
        tables.append(read_table(tmp_path / "p.csv"))
        (tmp_path / "p.csv").unlink()
    (texts, numbers), (others, other_numbers) = tables
    assert texts == others
    check_same(numbers, other_numbers)
    images = torch.rand(3, 1, 16, 16, dtype=torch.float64)
    with torch.no_grad():
        answers = [load_run(trained, kind.type).model()(images.to(kind)) for kind in (DEVICE, CPU)]
    assert answers[0].device == DEVICE
    check_same(*answers)
    peaks = {k: v for line in logged(trained) for k, v in line.items() if "memory/" in k}
    assert 0 < peaks["memory/peak_allocated_mib"] <= peaks["memory/peak_reserved_mib"]


def test_the_finder_of_learning_rates(train, job, tmp_path):
    words = [*job, *FEW, "callbacks=[progress,lr_finder]", "trainer.log_every_n_steps=1"]
    words.remove("callbacks.model_summary=null")
    words = [w for w in words if not w.startswith("callbacks.checkpoint")]
    words += ["callbacks.lr_finder.updates=8", "model.dropout=0"]
    found = []
    for more in ([], [ON_CPU]):
        run = tmp_path / str(len(more))
        train([*words, *more, f"run_dir={run}"])
        found.append(json.loads((run / "lr_finder.json").read_text()))
    assert found[0].keys() == found[1].keys()
    assert found[0]["loss"] == pytest.approx(found[1]["loss"], rel=1e-8)


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        pytest.param(
            ["+callbacks.own._target_=own.Exhaust"],
            8,
            ["out of memory", "gradient_accumulation_steps"],
            id="memory",
        ),
        pytest.param(
            ["+callbacks.own._target_=own.Fail"],
            8,
            ["SIM error: an illegal address"],
            id="the device",
            marks=needs_simulation,
        ),
        pytest.param(
            ["+callbacks.own._target_=own.Lack"],
            1,
            ["Could not run 'aten::relu'", ON_CPU],
            id="an operator",
            marks=needs_simulation,
        ),
        pytest.param(
            ["+callbacks.own._target_=own.Break"],
            1,
            ["SIMDNN_STATUS_EXECUTION_FAILED", ON_CPU],
            id="a library of the device",
            marks=needs_simulation,
        ),
        pytest.param(
            ["strategy.accelerator=xpu"],
            2,
            ["strategy.accelerator", f"no xpu: it has {DEVICE.type} and cpu"],
            id="another kind",
        ),
        pytest.param(
            ["strategy=ddp", "strategy.devices=9"],
            8,
            ["strategy.devices=9", f"{device_count()} of {DEVICE.type}", ON_CPU],
            id="too many",
        ),
    ],
)
def test_one_line_tells_what_the_device_refuses(train, job, tmp_path, words, code, said):
    (tmp_path / "own.py").write_text(OWN)
    done = train([*job, *FEW, *words], code, folder=tmp_path)
    # No other code shows a traceback.
    line = done.error if code != 1 else done.err.rpartition("\nerror: ")[2]
    for words in said:
        assert words in line
    assert "do not fit" not in done.err


@needs_simulation
def test_as_many_micro_batches_as_its_memory_asks_for():
    words = ["experiment=resnet18", "model=small_cnn", "callbacks=none", "loader.batch_size=256"]
    auto = [*words, "trainer.gradient_accumulation_steps=auto"]
    config = parse(compose(auto).config)
    module = torch.get_device_module(DEVICE)
    strategy = Strategy(DEVICE)
    peaks = {}
    weights = sum(p.nbytes for p in build(config, Strategy(CPU)).trainer.model.parameters())
    for steps in (1, 2):
        options = replace(config.trainer, gradient_accumulation_steps=steps)
        torch.accelerator.reset_peak_memory_stats()
        _tried(replace(config, trainer=options), strategy)
        peaks[steps] = torch.accelerator.max_memory_allocated() - spare_memory(DEVICE)
    try:
        module.set_memory_limit(0, int(peaks[2] / 0.9) + 10)  # a tenth is kept back
        assert find_accumulation_steps(config, strategy) == 2
        module.set_memory_limit(0, int(peaks[2] / 0.95))
        assert find_accumulation_steps(config, strategy) == 4
        module.set_memory_limit(0, 2 * weights)  # which momentum takes
        with pytest.raises(ResourceError, match=r"does not fit: its transforms: .*memory"):
            find_accumulation_steps(config, strategy)
    finally:
        module.set_memory_limit(0, 2**33)


def test_a_trial_holds_an_average_too_and_evaluates_a_batch():
    words = ["experiment=resnet18", "model=small_cnn", "loader.batch_size=64"]
    words += ["trainer.gradient_accumulation_steps=auto", "loader.num_workers=0"]
    peaks = []
    for callbacks in ("none", "[ema]"):
        config = parse(compose([*words, f"callbacks={callbacks}"]).config)
        torch.accelerator.reset_peak_memory_stats()
        _tried(config, Strategy(DEVICE))
        peaks.append(torch.accelerator.max_memory_allocated())
    state = build(config, Strategy(CPU)).trainer.model.state_dict()
    assert peaks[1] - peaks[0] == pytest.approx(sum(t.nbytes for t in state.values()), rel=0.2)


@needs_simulation
def test_an_evaluation_batch_that_does_not_fit_is_told_by_its_key():
    words = ["experiment=resnet18", "model=small_cnn", "callbacks=none", "loader.batch_size=16"]
    words += ["trainer.gradient_accumulation_steps=auto", "loader.num_workers=0"]
    module = torch.get_device_module(DEVICE)
    try:
        module.set_memory_limit(0, 2**22)
        config = parse(compose(words).config)
        assert find_accumulation_steps(config, Strategy(DEVICE)) == 1
        config = parse(compose([*words, "loader.eval_batch_size=4096"]).config)
        with pytest.raises(ResourceError, match=r"4096 samples of val .*loader\.eval_batch_size"):
            find_accumulation_steps(config, Strategy(DEVICE))
    finally:
        module.set_memory_limit(0, 2**33)


TWO = pytest.mark.skipif(device_count() < 2, reason="needs two accelerators")


@TWO
@pytest.mark.parametrize(
    ("words", "expected"),
    [
        pytest.param([], 0, id="the first"),
        pytest.param(["strategy.devices=[1]"], 1, id="by number"),
        pytest.param(["strategy=ddp"], 0, id="group in one process"),
        pytest.param(["strategy=ddp", "strategy.devices=[1,0]"], 1, id="group by numbers"),
    ],
)
def test_a_device_has_a_number(words, expected):
    here = torch.accelerator.current_device_index()
    for kind in ("auto", DEVICE.type):
        composed = compose(["experiment=resnet18", f"strategy.accelerator={kind}", *words])
        strategy = build_strategy(parse(composed.config))
        strategy.setup()
        assert strategy.device.index == torch.accelerator.current_device_index() == expected
    torch.accelerator.set_device_index(here)


@TWO
@pytest.mark.parametrize(
    "strategy",
    [
        pytest.param(["strategy=ddp"], id="ddp"),
        pytest.param(["strategy=fsdp"], id="fsdp"),
        pytest.param(["strategy=fsdp", "strategy.cpu_offload=true"], id="fsdp, offloaded"),
    ],
)
def test_two_of_them_train_as_one_process(train, tmp_path, strategy):
    words = [
        "experiment=resnet18",
        "model=mlp",
        "model.hidden=[16]",
        "trainer.precision=fp64",
        "trainer.max_steps=12",
        "loader.num_workers=0",
        "trainer.clip_grad_norm=0.5",
        "trainer.gradient_accumulation_steps=2",
        "trainer.log_every_n_steps=5",
        "loader.batch_size=67",
        "callbacks.model_summary=null",
    ]
    runs = []
    for more in ([], [*strategy, "strategy.devices=2"]):
        runs.append(tmp_path / str(len(more)))
        done = train([*words, *more, f"run_dir={runs[-1]}"])
        assert f"{DEVICE.type}:0" in done.err
    torch.testing.assert_close(weights(runs[1]), weights(runs[0]), rtol=0, atol=1e-10)
    lines = [
        [{k: v for k, v in line.items() if k[:4] not in ("time", "memo")} for line in logged(run)]
        for run in runs
    ]
    assert lines[1] == [pytest.approx(line, rel=1e-8) for line in lines[0]]
