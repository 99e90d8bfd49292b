"""Exported models in C++ and as machine code: built and run where a compiler is at hand."""

import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from torch.utils import cpp_extension

from models.small_cnn import SmallCNN
from trainer.errors import ModelError
from trainer.export.artefact import Exportable, largest_difference
from trainer.export.formats import FORMATS, Network, check_libraries
from trainer.task import Task

SOURCE = Path(__file__).parents[3] / "docs" / "cpp" / "load_torchscript.cpp"
needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="g++ is not installed")


def network():
    torch.manual_seed(0)
    model = SmallCNN(10).eval()
    return Network(model, Task(), torch.nn.Sequential(), interprets=False).eval()


@pytest.mark.slow
@needs_compiler
def test_the_loader_of_the_docs_answers_as_the_model_does(tmp_path):
    assert len(SOURCE.read_text().splitlines()) <= 30
    model = network()
    FORMATS["torchscript"].write(model, torch.randn(2, 1, 16, 16), tmp_path / "model.ts", {})
    flags = [f"-I{path}" for path in cpp_extension.include_paths()]
    for path in cpp_extension.library_paths():
        flags += [f"-L{path}", f"-Wl,-rpath,{path}"]
    loader = tmp_path / "load_torchscript"
    libraries = ["-ltorch", "-ltorch_cpu", "-lc10", "-o", str(loader)]
    subprocess.run(["g++", "-std=c++20", str(SOURCE), *flags, *libraries], check=True)
    asked = [str(loader), str(tmp_path / "model.ts"), "1", "16", "16"]
    done = subprocess.run(asked, check=True, capture_output=True, text=True)
    found = torch.tensor([float(line) for line in done.stdout.splitlines()])
    with torch.no_grad():
        torch.testing.assert_close(found, model(torch.zeros(1, 1, 16, 16))[0], atol=1e-5, rtol=0)
    wrong = subprocess.run([*asked[:1], str(SOURCE), *asked[2:]], capture_output=True, text=True)
    assert wrong.returncode == 1
    assert wrong.stderr.startswith("error: ")


@pytest.mark.slow
@needs_compiler
def test_a_compiled_package_answers_as_the_model_does(tmp_path):
    model, samples = network(), torch.randn(32, 1, 16, 16)
    form = FORMATS["aoti"]
    path = tmp_path / form.file
    form.write(model, samples[:2].clone(), path, {})
    answer = form.load(path, {})
    assert largest_difference(Exportable(model, samples, {}), path, answer, 1e-4, 1.0) < 1e-4


def test_a_package_needs_a_compiler(monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(ModelError, match="C\\+\\+ compiler"):
        check_libraries("aoti")
