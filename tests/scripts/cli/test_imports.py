"""Imports that a command leaves out until they are needed.

Tried in processes of their own.
"""

import subprocess
import sys

import pytest

from regimen.conf.layout import ROOT

PACKAGE = {
    "large/__init__.py": "print('executed'); from large.part import value; from large import other",
    "large/part.py": "value = 3",
    "large/other.py": "",
    "slow/__init__.py": "from slow.part import *; entered.set(); answered.wait(0.2); last = 3",
    "slow/part.py": "import threading; entered, answered = threading.Event(), threading.Event()",
}
PREPARED = """
from regimen.scripts.cli import deferred
deferred._MODULES |= dict.fromkeys(("large", "slow"))
deferred.defer_imports()
"""
UNTIL_NEEDED = """
from regimen.scripts.cli.deferred import defer_imports
defer_imports()
import sys
import torch, torchvision
from torch.utils.flop_counter import FlopCounterMode
from torchvision.transforms import v2

model = torch.nn.Linear(2, 2)
optimizer = torch.optim.AdamW(model.parameters())
with FlopCounterMode(display=False) as counter:
    model(torch.ones(1, 2))
assert counter.get_total_flops() == 8
optimizer.load_state_dict(optimizer.state_dict())
v2.RandomAffine(5)(torch.ones(1, 4, 4))

from regimen.trainer.assembly.check import _Unfilled
from regimen.trainer.assembly.summary import state_bytes

with torch.device("meta"), _Unfilled():  # as a model is checked
    torch.nn.Embedding(2, 2)
    torch.nn.init.kaiming_normal_(torch.empty(2, 2))
assert not {"torch._dynamo", "sympy"} & sys.modules.keys()
assert state_bytes(optimizer) == 2 * 6 * 4 + 2 * 4
assert "torch._dynamo" not in sys.modules
print("done")
"""
AND_THEN = """
plain = torch.optim.Optimizer.state_dict.__wrapped__
assert getattr(plain, "__dynamo_disable") is plain
one = torch.ones(2)
assert torch.equal(torch.compile(lambda x: x + 1, backend="eager")(one), one + 1)
assert not hasattr(plain, "__dynamo_disable")  # from here on torch's own way
optimizer.state_dict()
assert getattr(plain, "__dynamo_disable")._torchdynamo_disable
assert torchvision.models.resnet18.__module__ == "torchvision.models.resnet"
assert torchvision.ops.nms
print("done")
"""


@pytest.fixture
def run(tmp_path):
    for name, text in PACKAGE.items():
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)

    def run(script):
        env = {"PYTHONPATH": str(tmp_path), "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-c", script]
        ended = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
        assert ended.returncode == 0, ended.stderr
        return ended.stdout.split()

    return run


@pytest.mark.parametrize(
    ("use", "printed"),
    [
        pytest.param("import large", [], id="imported"),
        pytest.param("import large.part; print(large.part.value)", ["3"], id="a module of it"),
        pytest.param("import large; print(large.value)", ["executed", "3"], id="a name of it"),
        pytest.param("from large import value as v; print(v)", ["executed", "3"], id="from it"),
        pytest.param("from large import *; print(value)", ["executed", "3"], id="all of it"),
        pytest.param("import large; large.__path__; large.__file__", [], id="what tools look at"),
        pytest.param("import large; large.absent", ["executed"], id="a name that it has not"),
    ],
)
def test_a_package_is_executed_when_a_name_of_it_is_used(run, use, printed):
    attempt = f"try:\n {use}\nexcept AttributeError as error: assert 'large' in str(error)"
    assert run(PREPARED + attempt) == printed


def test_two_threads_use_it_at_once(run):
    """The second asks in the middle of what the first executes, and waits for its end."""
    use = """
import threading, slow, slow.part

def ask():
    try: print(slow.last)
    except AttributeError as error: print(error)
    slow.part.answered.set()

first = threading.Thread(target=ask)
first.start()
slow.part.entered.wait()
ask()
first.join()
"""
    assert run(PREPARED + use) == ["3", "3"]


def test_training_does_without_the_compiler(run):
    assert run(UNTIL_NEEDED) == ["done"]


@pytest.mark.slow
def test_once_the_compiler_is_there_torch_has_its_way(run):
    assert run(UNTIL_NEEDED + AND_THEN) == ["done", "done"]
