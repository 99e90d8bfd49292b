"""The simulated accelerator: it computes as the CPU does, and tells what a GPU would pass over.

Each test runs in processes of their own, in which `import torch` registers the device `sim`; so do
the tests for any accelerator.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from accelerator import environment

pytestmark = pytest.mark.slow  # it is compiled once: a minute

BEGIN = """
import os
import torch
from torch import nn
a = torch.arange(20.0, device="sim")
side = torch.Stream(device="sim")
def network():
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten()]
    return nn.Sequential(*layers, nn.Linear(144, 5), nn.LayerNorm(5)).double()
def trained(model, images, steps=3):
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    for _ in range(steps):
        optimizer.zero_grad()
        model(images).square().mean().backward()
        optimizer.step()
    return model.parameters()
images = torch.randn(8, 3, 8, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
"""


@pytest.fixture(scope="session")
def python():
    """Start Python with the device; skip where nothing can be compiled, but not in CI."""
    try:
        variables = environment()
    except FileNotFoundError as error:
        if os.environ.get("CI") == "true":
            raise
        pytest.skip(str(error))

    def start(*words, lacks="", **options):
        return subprocess.Popen(
            [sys.executable, *words],
            env={**os.environ, **variables, "SIM_LACKS": lacks},
            stdout=subprocess.PIPE,
            text=True,
            **options,
        )

    return start


@pytest.fixture(scope="session")
def started(python):
    """Start a program on the device."""
    return lambda code, *words: python("-c", BEGIN + code, *words, stderr=subprocess.PIPE)


TESTS = Path(__file__).parents[1]


@pytest.mark.parametrize(
    "path",
    [
        *sorted(f"integration/device/{p.name}" for p in TESTS.glob("integration/device/test_*.py")),
        "trainer/update/test_nonfinite.py",
        "trainer/update/test_turns.py",
    ],
)
def test_on_it_pass_the_tests_for_any_accelerator(python, path):
    words = ["-m", "pytest", "-n0", "-m", "", "-k", "not processes", str(TESTS / path)]
    process = python(*words, stderr=subprocess.STDOUT)
    output, _ = process.communicate(timeout=1200)
    print(output)
    assert process.returncode == 0


@pytest.mark.parametrize(
    "lacks",
    [
        pytest.param("", id="nothing"),
        pytest.param("float64", id="float64"),
        pytest.param("fused", id="fused kernels"),
        pytest.param("found_inf", id="fused kernels that heed found_inf"),
        pytest.param("streams", id="streams"),
        pytest.param("pinned", id="pinned memory"),
        pytest.param("float64,fused,streams,pinned,statistics,collectives", id="all"),
    ],
)
def test_a_run_does_without_what_a_device_lacks(python, lacks):
    path = TESTS / "integration" / "device" / "test_poorer.py"
    process = python("-m", "pytest", "-n0", str(path), lacks=lacks, stderr=subprocess.STDOUT)
    output, _ = process.communicate(timeout=600)
    print(output)
    assert process.returncode == 0


@pytest.mark.parametrize(
    ("code", "said"),
    [
        pytest.param(
            "ours = trained(network().to('sim'), images.to('sim'))\n"
            "alone = trained(network(), images)\n"
            "assert all(torch.equal(p.cpu(), q) for p, q in zip(ours, alone))\n"
            "torch.manual_seed(5); drawn = torch.rand(4, device='sim').cpu()\n"
            "torch.manual_seed(5); assert torch.equal(drawn, torch.rand(4))",
            "",
            id="numbers",
        ),
        pytest.param("with side: b = a * 2\nb + 1", "race: aten::add", id="missing wait"),
        pytest.param(
            "with side: b = a * 2\n"
            "torch.accelerator.current_stream().wait_stream(side)\nb + 1; del b\n"
            "with side: torch.empty(3, device='sim')",
            "race: an allocation",
            id="missing record_stream",
        ),
        pytest.param(
            "with side: b = a * 2\n"
            "here = torch.accelerator.current_stream(); here.wait_stream(side)\n"
            "b.record_stream(here); b + 1; del b\n"
            "with side: torch.empty(3, device='sim')",
            "",
            id="recorded",
        ),
        pytest.param(
            "p = torch.zeros(20).pin_memory(); p.copy_(a, non_blocking=True)\n"
            "assert p.isnan().all()\n"
            "here = torch.accelerator.current_stream().record_event().synchronize()\n"
            "assert torch.equal(p, torch.arange(20.0))",
            "",
            id="a copy arrives when it is waited for",
        ),
        pytest.param(
            "p = torch.zeros(20).pin_memory(); b = p.to('sim', non_blocking=True)\n"
            "p[0] = 1; b.sum().item()",
            "race: the host changed pinned memory",
            id="source overwritten",
        ),
        pytest.param("a + torch.ones(20)", "same device", id="a CPU tensor beside"),
        pytest.param("a + torch.ones(20, device='sim:1')", "same device", id="two devices"),
        pytest.param(
            "torch.rand(2, device='sim', generator=torch.Generator())", "generator", id="generator"
        ),
        pytest.param(
            "torch.sim.set_memory_limit(0, 10**6); torch.empty(10**6, device='sim')",
            "OutOfMemoryError",
            id="memory",
        ),
        pytest.param(
            "if os.fork(): os._exit(os.waitstatus_to_exitcode(os.wait()[1]))\na + 1",
            "forked subprocess",
            id="fork",
        ),
        pytest.param(
            "with torch.sim.waits() as found: a.sum().item(); a[a > 3]; a.cpu(); a + 1\n"
            "assert sum(found.values()) == 3, found\n"
            "assert torch.accelerator.max_memory_allocated() > 0",
            "",
            id="waits are counted",
        ),
    ],
)
def test_the_device_is_exact_and_strict(started, code, said):
    process = started(code)
    _, errors = process.communicate(timeout=300)
    assert (process.returncode == 0) == (said == ""), errors
    assert said in errors


WITHOUT_COMPILER = """
from regimen.scripts.cli.deferred import defer_imports
defer_imports()
import sys
import torch
from regimen.trainer.tasks.classification import Classification
from regimen.trainer.trainer import Trainer
model = torch.nn.Linear(4, 3)
optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, fused=True)
trainer = Trainer(model, Classification(3), optimizer, [(torch.ones(8, 4), torch.zeros(8).long())])
trainer.fit()
assert trainer.updater.guard.is_deferred and model.weight.device.type == "sim"
assert "torch._dynamo" not in sys.modules  # three seconds of the first update
"""


def test_the_first_update_does_without_the_compiler(python):
    process = python("-c", WITHOUT_COMPILER, stderr=subprocess.PIPE)
    _, errors = process.communicate(timeout=300)
    assert process.returncode == 0, errors
