"""A strategy of a user's own project: a class, its keywords, a YAML; in one process and in two."""

import pytest
import torch

from regimen.conf.check import parse
from regimen.conf.errors import ConfigError
from regimen.scripts.composition.compose import compose
from regimen.trainer.assembly.check import check_targets
from regimen.trainer.strategies.fsdp import FSDP
from regimen.trainer.strategies.single import Single

CODE = """
from contextlib import contextmanager

from regimen.trainer.strategies.ddp import DDP
from regimen.trainer.strategies.multi_process import MultiProcess
from regimen.trainer.strategies.strategy import Strategy


class Quiet(Strategy):
    name = "quiet"

    def __init__(self, *, word: str, factor: float = 1.0):
        super().__init__("cpu")
        self.gradient_scale = factor


class ByHand(MultiProcess):
    name = "by_hand"

    def __init__(self, *, factor: float = 1.0, **processes):
        super().__init__(**processes)
        self._factor = factor

    @contextmanager
    def accumulate(self, wrapped, last, counts=True):
        yield
        for parameter in wrapped.parameters() if last else ():
            mean = self.group.reduce(parameter.grad) / self.gradient_scale
            parameter.grad = mean * self._factor

class Derived(DDP):
    name = "derived"


class Shared(Strategy):
    name = "shared"
    shares_parameters = True


class Half(Strategy):
    starts_processes = True
"""
YAML = """# train strategy=by_hand
_target_: my_strategies.ByHand
accelerator: cpu
devices: 2
timeout: 60.0
factor: 1.0
"""
JOB = [
    "--config-dir",
    "conf",
    "experiment=resnet18",
    "model=mlp",
    "model.hidden=[16]",
    "loader.num_workers=0",
    "loader.batch_size=100",
    "trainer.max_epochs=1",
    "callbacks.model_summary=null",
]


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    folder = tmp_path_factory.mktemp("project")
    (folder / "conf" / "strategy").mkdir(parents=True)
    (folder / "conf" / "strategy" / "by_hand.yaml").write_text(YAML)
    (folder / "my_strategies.py").write_text(CODE)
    return folder


def weights(run):
    return torch.load(run / "checkpoints" / "last.pt", weights_only=True)["model"]


def test_an_own_strategy_trains_in_one_process_and_in_two(train, evaluated, project):
    for name, words in {
        "single": ["strategy.accelerator=cpu"],
        "quiet": ["strategy._target_=my_strategies.Quiet", "strategy.word=hush"],
        "by_hand": ["strategy=by_hand"],
    }.items():
        train([*JOB, *words, f"run_dir={name}"], folder=project)
    expected = weights(project / "single")
    torch.testing.assert_close(weights(project / "quiet"), expected, rtol=0, atol=0)
    torch.testing.assert_close(weights(project / "by_hand"), expected, rtol=0, atol=1e-5)
    assert (
        "by_hand (2 devices)"
        in train([*JOB, "strategy=by_hand", "dry_run=true"], folder=project).out
    )


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["word=x", "facter=2"],
            r"strategy\.facter: .*Quiet has no argument .*did you mean factor",
        ),
        (["word=x", "factor=a"], r"strategy\.factor: expected float, got 'a'"),
        (["factor=2"], r"strategy\.word: missing: my_strategies\.Quiet needs it"),
        (["_target_=torch.nn.Identity"], r"makes no regimen.*\.Strategy but a torch\.nn"),
        (["_target_=my_strategies.contextmanager"], "strategy._target_"),
        (["_target_=nowhere.Mine"], r"strategy\._target_: .*nowhere"),
    ],
)
def test_its_mistakes_are_named(project, monkeypatch, words, message):
    monkeypatch.chdir(project)
    typed = ["strategy._target_=my_strategies.Quiet", *(f"strategy.{word}" for word in words)]
    with pytest.raises(ConfigError, match=message):
        check_targets(parse(compose([*JOB, *typed]).config))


def test_averages_are_not_copied_into_weights_that_processes_share(project, monkeypatch):
    monkeypatch.chdir(project)
    typed = ["strategy._target_=my_strategies.Shared", "callbacks=[default,ema]"]
    with pytest.raises(ConfigError, match=r"callbacks\.ema: each process would copy"):
        check_targets(parse(compose([*JOB, *typed]).config))


@pytest.mark.parametrize("word", ["trainer.on_nonfinite=skip", "trainer.precision=fp16"])
def test_processes_that_share_weights_leave_no_update_out(project, monkeypatch, word):
    monkeypatch.chdir(project)
    typed = ["strategy._target_=my_strategies.Shared", word]
    with pytest.raises(ConfigError, match=f"{word.partition('=')[0]}: updates are left out by all"):
        check_targets(parse(compose([*JOB, *typed]).config))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["devices=0"], "strategy.devices: expected a number >= 1, a list of numbers, or auto"),
        (["devices=x"], "strategy.devices: expected a number >= 1"),
        (["max_restarts=-1"], "strategy.max_restarts: expected an integer >= 0, got -1"),
        (["comm_hook=foo"], "strategy.comm_hook: there is no 'foo'; there are fp16_compress"),
        (["comm_hok=foo"], "strategy.comm_hok: my_strategies.Derived has no argument"),
        (["_target_=my_strategies.Half"], "strategy._target_: Half starts processes; derive it"),
    ],
)
def test_a_mistake_in_a_class_derived_from_ours_starts_no_process(train, project, words, message):
    typed = ["strategy._target_=my_strategies.Derived", "run_dir=wrong"]
    typed += [f"+strategy.{word}" for word in words]
    done = train([*JOB, *typed], 2, folder=project)
    assert message in done.error
    assert not (project / "wrong").exists()


@pytest.mark.parametrize(
    ("base", "given", "message"),
    [
        (Single, {"devices": 5}, "strategy.devices: Mine trains on one device, not on 5"),
        (Single, {"devices": [0, 1]}, "strategy.devices: Mine trains on one device"),
        (Single, {"devices": "x"}, "strategy.devices: Mine trains on one device, not on x"),
        (Single, {"devices": 1}, None),
        (FSDP, {"tensor_parallel": {"sizze": 2}}, "tensor_parallel.sizze: unknown key"),
        (FSDP, {"tensor_parallel": {"size": "x"}}, "strategy.tensor_parallel.size: expected"),
        (FSDP, {"tensor_parallel": 2}, "strategy.tensor_parallel: expected size and plan"),
        (FSDP, {"tensor_parallel": {"size": 2}}, None),
    ],
)
def test_a_class_derived_from_ours_is_held_against_the_values_that_it_takes(base, given, message):
    mine = type("Mine", (base,), {})
    told = [str(problem) for problem in mine.problems(**{"devices": 2, **given})]
    if message is None:
        assert told == []
    else:
        assert message in told[0]


def test_a_prediction_takes_a_class_that_is_typed(train, project):
    train([*JOB, "strategy.accelerator=cpu", "run_dir=asked"], folder=project)
    words = ["run=asked", "source=test", "--allow-target", "my_strategies"]
    tables = []
    for more in ([], ["strategy._target_=my_strategies.Quiet", "strategy.word=hush"]):
        train([*words, *more, "out=answers.csv"], command="predict", folder=project)
        tables.append((project / "answers.csv").read_text())
        (project / "answers.csv").unlink()
    assert tables[0] == tables[1]
    typed = ["strategy._target_=my_strategies.Quiet", "out=answers.csv"]
    done = train([*words, *typed], 2, command="predict", folder=project)
    assert "strategy.word: missing" in done.error
