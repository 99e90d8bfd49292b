"""Exported models have the outputs of the model, or are not written; in 8 bits, nearly so."""

import json
import shutil
import subprocess
from pathlib import Path
from typing import get_args

import numpy as np
import pytest
import torch
import yaml
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn
from torch.utils import cpp_extension

from regimen.callbacks.compression.qat import QuantizationAwareTraining
from regimen.conf.check import parse
from regimen.data.errors import DataError
from regimen.data.transforms import Pipeline, Standardize, ToFloat
from regimen.models.small_cnn import SmallCNN
from regimen.scripts.cli.arguments import RunRequest, parse_arguments
from regimen.scripts.cli.keys import Format
from regimen.scripts.composition.compose import compose
from regimen.scripts.runs.run import run as train
from regimen.trainer.assembly.parts import Assembly
from regimen.trainer.errors import ModelError
from regimen.trainer.export import artefact, formats, quantization
from regimen.trainer.export.artefact import FOLDERS, evaluate_artefact, export_run, samples_of
from regimen.trainer.export.quantization import calibration, integer_model, method_for, quantize_run
from regimen.trainer.inference.run import evaluate_run, load_run
from regimen.trainer.strategies.strategy import Strategy
from regimen.trainer.task import Task
from regimen.trainer.tasks.classification import Classification

onnx = pytest.importorskip("onnx")
onnxruntime = pytest.importorskip("onnxruntime")
SOURCE = Path(__file__).parents[3] / "docs" / "cpp" / "load_torchscript.cpp"
compiled = pytest.mark.skipif(shutil.which("g++") is None, reason="g++ is not installed")


SMALL = ("resnet18", "model=small_cnn", "optimizer=sgd_nesterov", "optimizer.lr=0.2")


def trained(path, *more, experiment=SMALL):
    """Train for three epochs, a small network on the digits if nothing else is said."""
    name, *overrides = experiment
    words = [f"experiment={name}", *overrides, "trainer.max_epochs=3", *more]
    words += ["loader.num_workers=0", "callbacks.progress=null", f"run_dir={path}"]
    composed = compose(parse_arguments(words))
    request = RunRequest(composed.config, composed.overrides, {}, words)
    assert train(request) == 0
    return load_run(path, "cpu")


def network_of(module):
    """Return a module with its task, as the formats take it."""
    return formats.Network(module, Task())


def names_in(folder):
    return {path.name for path in folder.iterdir()}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return trained(tmp_path_factory.mktemp("runs") / "run", "callbacks.checkpoint.save_top_k=-1")


def logits(run, inputs):
    with torch.no_grad():
        return run.model()(inputs)


def onnx_outputs(path, inputs):
    session = onnxruntime.InferenceSession(str(path))
    names = [output.name for output in session.get_outputs()]
    arrays = session.run(None, {"input": np.asarray(inputs)})
    tensors = [torch.from_numpy(array) for array in arrays]
    return session, dict(zip(names, tensors, strict=True))


def check_figures(run, step, path, facts):
    """Check that metrics and card are those of the step, not of the end of the run."""
    found = facts["provenance"]["results"]
    of_step = [line for line in run.metrics if line["step"] == step]
    (validated,) = [line for line in of_step if "val/loss" in line]
    best = run.components().state.global_step
    loss = validated["val/loss"]
    assert found["val/loss"] == loss
    assert ("test/loss" in found) == (step == best)  # only the best checkpoint was tested

    card = path.with_name("card.md").read_text()
    _, _, behind = card.partition(f"## Metrics of the checkpoint (step {step})")
    section, _, _ = behind.partition("##")
    assert f"- val/loss: {loss:.4f}" in section

    _, _, behind = card.partition("```yaml\n")
    facts_in_yaml, _, _ = behind.partition("```")
    about = yaml.safe_load(facts_in_yaml)
    steps = [line["step"] for line in about["validations"]]
    assert steps == [20, 40, 60]


def test_figures_are_those_of_the_checkpoint(run, tmp_path):
    for step in (20, 40, 60):
        checkpoint = run.path / "checkpoints" / f"step-{step:08}.pt"
        out = tmp_path / f"{step}"
        path, facts = export_run(run, "safetensors", out, checkpoint=str(checkpoint))
        check_figures(run, step, path, facts)

    own_config = run.path / "config.yaml"
    assert path.with_name("config.yaml").read_text() == own_config.read_text()

    with safe_open(path, "pt") as file:
        metadata = file.metadata()
    told = json.loads(metadata["regimen"])
    assert told["provenance"] == facts["provenance"]
    assert told["classes"] == [str(digit) for digit in range(10)]


def graph_of(path):
    return onnx.load(str(path)).graph


def says_where_it_comes_from(run, path, facts):
    session, _ = onnx_outputs(path, torch.zeros(1, 1, 16, 16))
    (taken,) = session.get_inputs()
    (given,) = session.get_outputs()
    assert taken.name == "input"
    assert taken.shape == ["batch", 1, 16, 16]
    assert given.name == "output"
    assert given.shape == ["batch", 10]

    metadata = session.get_modelmeta().custom_metadata_map
    classes = json.loads(metadata["classes"])
    origin = json.loads(metadata["provenance"])
    config = (run.path / "config.yaml").read_text()
    assert classes == [str(digit) for digit in range(10)]
    assert origin == facts["provenance"]
    assert origin["step"] == run.components().state.global_step
    assert origin["config"] == config
    samples = [split["samples"] for split in origin["data"]]
    assert samples == [1257, 270, 270]

    card = path.with_name("card.md").read_text()
    written = path.with_name("export.json").read_text()
    assert config.rstrip() in card
    assert f"sha256: {origin['sha256']}" in card
    assert "samples: 1257" in card
    assert json.loads(written) == facts
    assert names_in(path.parent) == {"card.md", "export.json", "model.onnx"}
    nodes = graph_of(path).node
    assert not nodes[0].metadata_props  # the exporter's notes, half of a small file


def test_preprocessing_inside_takes_bytes_and_gives_probabilities(run, tmp_path):
    path, facts = export_run(run, "onnx", tmp_path / "o", preprocessing="inside")
    assert facts["transforms_of_the_caller"] == {}
    assert facts["verified"]["samples"] == "of the run"

    pixels = np.random.default_rng(0).integers(0, 256, (4, 1, 16, 16), dtype=np.uint8)
    _, found = onnx_outputs(path, pixels)
    scaled = torch.from_numpy(pixels).float() / 255
    standardized = (scaled - 0.305) / 0.319
    expected = logits(run, standardized).softmax(1)

    torch.testing.assert_close(found["output"], expected, atol=1e-5, rtol=0)

    _, metrics_of_the_run = evaluate_run(run.config, run.path, "best", None)
    split, metrics = evaluate_artefact(run.config, path)
    assert split == "test"
    assert metrics == pytest.approx(metrics_of_the_run, abs=1e-4)


FORMATS = [name for name in get_args(Format) if name not in FOLDERS]
SLOW_TO_COMPILE = pytest.param("aoti", marks=[compiled, pytest.mark.slow])
QUICK = [SLOW_TO_COMPILE if name == "aoti" else name for name in FORMATS]


def answers_of(name, lines, x):
    """Run the lines of a card, as a reader would, and return what they answer."""
    is_onnx = name == "onnx"
    names = {"x": x.numpy() if is_onnx else x}
    exec("\n".join(lines), names)
    if name == "safetensors":  # these make the model only
        return names["model"].eval()(x)
    if is_onnx:
        return torch.as_tensor(names["answers"][0])
    return torch.as_tensor(names["answers"])


def test_every_format_has_a_way_to_load_it():
    assert set(FORMATS) == {*formats.GRAPHS, "safetensors"}


@pytest.mark.parametrize("name", QUICK)
def test_the_lines_of_the_card_run_a_file_with_the_metrics_of_the_run(
    run, tmp_path, monkeypatch, name
):
    monkeypatch.chdir(tmp_path)  # where the command was typed
    path, facts = export_run(run, name, Path("o"))
    card = path.with_name("card.md").read_text()
    lines = formats.how_to_load(facts, path.parent)

    for line in lines:
        assert line in card

    for size in (1, 4):
        x = torch.randn(size, 1, 16, 16)
        found = answers_of(name, lines, x)
        torch.testing.assert_close(found, logits(run, x), atol=1e-4, rtol=1e-4)

    notes = " ".join(facts.get("notes", []))
    assert ("deprecated" in notes) == (name == "torchscript")
    assert ("machine code" in notes) == (name == "aoti")

    if name == "onnx":
        says_where_it_comes_from(run, path, facts)

    _, expected = evaluate_run(run.config, run.path, "best", None)
    _, metrics = evaluate_artefact(run.config, path, "test", allow_code=True)

    assert metrics == pytest.approx(expected, abs=1e-4)


def test_lines_make_nodes_within_nodes(tmp_path):
    layers = {
        "a": {
            "_target_": "torch.nn.Conv2d",
            "in_channels": 1,
            "out_channels": 2,
            "kernel_size": 3,
        },
        "b": {"_target_": "torch.nn.Flatten"},
    }
    node = {
        "_target_": "regimen.models.sequential.from_layers",
        "layers": layers,
        "input_shape": [1, 4, 4],
    }
    tuned = {
        "_target_": "regimen.models.pretrained.fine_tune",
        "model": node,
        "weights": "gone.pt",  # of where the training began: not needed to load its result
    }
    conv = nn.Conv2d(1, 2, 3)
    weights = {"a.weight": conv.weight.detach(), "a.bias": conv.bias.detach()}
    save_file(weights, tmp_path / "model.safetensors")
    facts = {"format": "safetensors", "model": tuned, "file": "model.safetensors"}

    lines = formats.how_to_load(facts, tmp_path)
    names = {}
    exec("\n".join(lines), names)

    x = torch.randn(2, 1, 4, 4)

    assert torch.equal(names["model"](x), conv(x).flatten(1))


class TwoHeads(nn.Module):
    def forward(self, x):
        size = x.mean((1, 2, 3))
        first = x.flatten(1)[:, :4].sin()
        return {"size": size, "more": (first, None)}


@pytest.mark.parametrize("name", ["onnx", "torch_export", "torchscript"])
def test_outputs_of_a_model_of_ones_own_have_names(run, tmp_path, monkeypatch, name):
    monkeypatch.setattr(run, "model", lambda checkpoint: TwoHeads())
    x = torch.randn(3, 1, 16, 16)
    expected = TwoHeads()(x)
    first_of_more, _ = expected["more"]

    path, _ = export_run(run, name, tmp_path / name)
    if name == "onnx":
        _, found = onnx_outputs(path, x)
    else:
        program = formats.GRAPHS[name].load(path)
        found = program(x)

    assert list(found) == ["size", "more_output1"]
    torch.testing.assert_close(found["size"], expected["size"], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(found["more_output1"], first_of_more, atol=1e-5, rtol=1e-5)


class Branches(nn.Module):
    def forward(self, x):
        mean = x.mean((2, 3))
        if x.sum() > 0:
            return mean
        return -mean


class BranchesInNumpy(nn.Module):
    def forward(self, x):
        mean = x.mean((2, 3))
        if np.sum(x.numpy()) > 0:
            return mean
        return -mean


def test_a_branch_is_scripted_or_no_file_is_written(run, tmp_path, monkeypatch):
    # The first samples take another branch than all together.
    values = torch.linspace(-3, 1, 32).flip(0)
    inputs = values[:, None, None, None].expand(32, 1, 4, 4)
    monkeypatch.setattr(artefact, "samples_of", lambda run, names: (inputs, True))

    monkeypatch.setattr(run, "model", lambda checkpoint: BranchesInNumpy())

    with pytest.raises(ModelError, match="outputs of"):
        export_run(run, "torchscript", tmp_path / "o")

    monkeypatch.setattr(run, "model", lambda checkpoint: Branches())
    with pytest.raises(ModelError, match=r"torch\.export"):
        export_run(run, "torch_export", tmp_path / "o")
    assert list(tmp_path.iterdir()) == []

    path, _ = export_run(run, "torchscript", tmp_path / "o")
    network = torch.jit.load(str(path))
    for some in (inputs, inputs[:1]):
        assert torch.equal(network(some), Branches()(some))


def assert_kept(run, folder, overwrite):
    """Check that an export into the folder is refused, and leaves what lies there."""
    file = folder / "mine"
    file.touch()
    with pytest.raises(ModelError, match="overwrite=true replaces it if it holds"):
        export_run(run, "safetensors", folder, overwrite=overwrite)
    assert file.exists()


def test_a_folder_is_replaced_only_when_asked(run, tmp_path):
    path, _ = export_run(run, "safetensors", tmp_path / "o")
    folder = path.parent
    others = tmp_path / "of_others"
    others.mkdir()

    assert_kept(run, folder, overwrite=False)
    assert_kept(run, others, overwrite=True)

    export_run(run, "safetensors", folder, overwrite=True)
    assert not (folder / "mine").exists()


def test_what_a_killed_export_left_is_cleaned_up(run):
    left = run.path / "exports" / ".tmp-safetensors"
    left.mkdir(parents=True)
    (left / "model.onnx").touch()

    export_run(run, "safetensors")

    assert names_in(left.parent) == {"safetensors"}


def test_without_the_data_it_is_verified_on_random_inputs(run, tmp_path, monkeypatch):
    def gone(config, splits):
        raise DataError("data.root is gone")

    monkeypatch.setattr(artefact, "build_data", gone)
    for preprocessing in ("outside", "inside"):
        _, facts = export_run(run, "torchscript", tmp_path / preprocessing, preprocessing)
        assert facts["verified"]["samples"] == "random"


def test_a_transform_that_fits_no_graph_is_named():
    transforms = {
        "scale": ToFloat(),
        "odd": lambda x: x,
        "n": Standardize([0.5], [0.5]),
    }
    pipeline = Pipeline(transforms)
    with pytest.raises(ModelError, match=r"transforms\.eval\.odd"):
        formats.build_network(nn.Identity(), Classification(10), pipeline, "inside")


def test_files_that_run_code_or_were_changed_are_not_loaded(run, tmp_path):
    path, _ = export_run(run, "torchscript", tmp_path / "ts")
    with pytest.raises(ModelError, match="allow_code=true"):
        evaluate_artefact(run.config, path, "test", allow_code=False)

    path.write_bytes(path.read_bytes() + b"more")
    with pytest.raises(ModelError, match="not the file"):
        evaluate_artefact(run.config, path, "test", allow_code=True)

    with pytest.raises(ModelError, match=r"export\.json"):
        evaluate_artefact(run.config, run.path / "config.yaml", "test", allow_code=True)


HUGE = {"_target_": "torch.nn.Linear", "in_features": 10**6, "out_features": 10**9}


@pytest.mark.parametrize(
    ("change", "told"),
    [
        pytest.param({"output": None}, "has no 'output'", id="no output"),
        pytest.param({"format": ["onnx"]}, "its 'format' cannot be", id="a list as format"),
        pytest.param({"format": "nonsense"}, "unknown format 'nonsense'", id="an unknown format"),
        pytest.param({"file": 3}, "its 'file' cannot be 3", id="a number as file"),
        pytest.param({"model": "Net"}, "its 'model' cannot be", id="a text as model"),
        pytest.param({"num_classes": "ten"}, "its 'num_classes' cannot be", id="text as classes"),
        pytest.param({"num_classes": 10**9}, "1000000000 classes, the data", id="many classes"),
        pytest.param({"transforms_of_the_caller": 3}, "cannot be 3", id="transforms as a number"),
        pytest.param({"output": "x" * 5000}, "has the output 'xxx", id="a long output"),
        pytest.param({"model": HUGE}, "cannot be loaded", id="a huge network"),
    ],
)
def test_facts_beside_a_file_of_another_form_are_named(run, tmp_path, change, told):
    path, _ = export_run(run, "safetensors", tmp_path / "weights")
    place = path.with_name("export.json")
    facts = json.loads(place.read_text())
    for key, value in change.items():
        if value is None:
            del facts[key]
        else:
            facts[key] = value
    place.write_text(json.dumps(facts))

    with pytest.raises(ModelError, match=told) as caught:
        evaluate_artefact(run.config, path, "test")
    assert len(str(caught.value)) < 1000


IMAGE = torch.randn(2, 1, 16, 16)
NETWORKS = [
    ("resnet18", [], IMAGE),
    ("vit_tiny", ["model.depth=2"], IMAGE),
    ("unet", ["data=digit_masks", "task=segmentation"], torch.randn(2, 1, 32, 32)),
    ("gpt_tiny", ["experiment=char_lm", "model.depth=2"], torch.randint(96, (2, 64))),
]


@pytest.mark.parametrize(("model", "more", "x"), [pytest.param(*n, id=n[0]) for n in NETWORKS])
def test_every_kind_of_network_of_ours_can_be_exported(model, more, x):
    composed = compose(["experiment=resnet18", f"model={model}", *more])
    config = parse(composed.config)
    built = Assembly(config, Strategy("cpu"), config.data.num_classes).model

    exportable = formats.Exportable(network_of(built), x, {})
    program = formats.exported_program(exportable).module()

    for inputs in (x, x[:1], torch.cat([x, x])):
        with torch.no_grad():
            found = program(inputs)
            expected = built(inputs)
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


def build_loader(executable):
    """Compile the program of the docs against torch's libraries."""
    flags = [f"-I{path}" for path in cpp_extension.include_paths()]
    for path in cpp_extension.library_paths():
        flags += [f"-L{path}", f"-Wl,-rpath,{path}"]
    flags += ["-ltorch", "-ltorch_cpu", "-lc10", "-o", executable]
    subprocess.run(["g++", "-std=c++20", str(SOURCE), *flags], check=True)


@pytest.mark.slow
@compiled
def test_the_loader_of_the_docs_answers_as_the_model_does(tmp_path):
    torch.manual_seed(0)
    network = network_of(SmallCNN(10))
    graph = formats.Exportable(network, torch.randn(2, 1, 16, 16), {})
    formats.GRAPHS["torchscript"].write(graph, tmp_path / "model.ts")
    loader = str(tmp_path / "load_torchscript")
    build_loader(loader)

    def answer(file):
        command = [loader, str(file), "1", "16", "16"]
        return subprocess.run(command, capture_output=True, text=True)

    done = answer(tmp_path / "model.ts")

    assert done.returncode == 0

    found = torch.tensor([float(line) for line in done.stdout.splitlines()])
    with torch.no_grad():
        expected = network(torch.zeros(1, 1, 16, 16))[0]
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)

    wrong = answer(SOURCE)
    assert wrong.returncode == 1
    assert wrong.stderr.startswith("error: ")
    assert len(SOURCE.read_text().splitlines()) <= 30


@pytest.fixture(scope="module")
def static(run, tmp_path_factory):
    """Return the path and the facts of the run's network in 8 bits."""
    return quantize_run(run, out=tmp_path_factory.mktemp("quantized") / "static")


def test_static_integers_lose_at_most_a_point(run, static):
    path, facts = static
    before = facts["before"]
    after = facts["after"]

    assert after["test/accuracy"] >= before["test/accuracy"] - 0.01 > 0.89
    assert after["megabytes"] < 0.5 * before["megabytes"]
    assert facts["quantization"] == {
        "method": "static",
        "weights": "uint8",
        "ranges": "of training samples",
        "activations": "uint8",
        "calibration_samples": 512,
    }
    assert facts["provenance"]["run"] == str(run.path)
    assert names_in(path.parent) == {"card.md", "export.json", "model.onnx"}
    assert "calibration_samples: 512" in path.with_name("card.md").read_text()

    tested = {name: value for name, value in after.items() if name.startswith("test/")}
    assert evaluate_artefact(run.config, path) == ("test", tested)


def test_static_integers_are_those_of_weights_and_biases(static):
    path, _ = static
    types = onnx.TensorProto
    graph = graph_of(path)
    kinds = {tensor.name: tensor.data_type for tensor in graph.initializer}
    quantized = [node.input[0] for node in graph.node if node.op_type == "DequantizeLinear"]
    of_weights = {kinds[name] for name in quantized if name in kinds}
    of_matrices = {tensor.data_type for tensor in graph.initializer if len(tensor.dims) > 1}

    assert of_weights == {types.UINT8, types.INT32}  # int32: of biases
    assert types.FLOAT not in of_matrices


def test_calibration_sees_the_first_samples_of_the_seed(run):
    names = list(run.config.transforms.eval)
    few = [batch["input"] for batch in calibration(run.config, names, 64)]
    every = [batch["input"] for batch in calibration(run.config, names, 10_000)]
    sizes = [len(batch) for batch in few]
    darkest = min(batch.min() for batch in every)
    black = (0 - 0.305) / 0.319  # standardized

    assert sizes == [32, 32]
    assert np.array_equal(few, every[:2])
    assert sum(len(batch) for batch in every) == 1257
    assert darkest == pytest.approx(black)


def outputs_in_training(run, samples):
    """Return what the model answers with the roundings that it was trained with."""
    payload = torch.load(run.path / "checkpoints" / "best.pt", weights_only=True)
    learnt = payload["callbacks"]["qat"]
    model = run.model()
    rounding = QuantizationAwareTraining()
    rounding.check(model)
    rounding.load_state_dict(learnt)
    rounding.attach(model)
    with torch.inference_mode():
        outputs = model(samples)
    rounding.teardown(None)
    return outputs, learnt["fake_quantization"]


@pytest.fixture(scope="module")
def qat(tmp_path_factory):
    return trained(tmp_path_factory.mktemp("qat") / "run", "callbacks=[default,qat]")


@pytest.fixture(scope="module")
def learnt_integers(qat, tmp_path_factory):
    """Return the path and the facts of a network in 8 bits that was trained for them."""
    return quantize_run(qat, out=tmp_path_factory.mktemp("qat") / "q")


def test_a_network_trained_for_8_bits_keeps_plain_weights_and_its_accuracy(
    run, qat, learnt_integers
):
    _, facts = learnt_integers
    weights = qat.components().model.state_dict()
    plain = run.components().model.state_dict()
    before = facts["before"]["test/accuracy"]
    after = facts["after"]["test/accuracy"]

    assert list(weights) == list(plain)
    assert facts["quantization"]["ranges"] == "learnt in training"
    assert after >= before - 0.005


def test_a_network_trained_for_8_bits_answers_as_it_did_in_training(qat, learnt_integers):
    path, _ = learnt_integers
    names = list(qat.config.transforms.eval)
    samples, _ = samples_of(qat, names)
    expected, _ = outputs_in_training(qat, samples)
    _, outputs = onnx_outputs(path, samples)
    found = outputs["output"]
    error = (found - expected).square().mean().sqrt()
    largest = expected.abs().max()

    assert torch.equal(found.argmax(1), expected.argmax(1))
    assert error < 0.02 * largest


def test_a_network_trained_for_8_bits_has_its_scales_in_the_file(qat, learnt_integers):
    path, _ = learnt_integers
    names = list(qat.config.transforms.eval)
    samples, _ = samples_of(qat, names)
    _, ranges = outputs_in_training(qat, samples)
    learnt_scales = (ranges["high"] - ranges["low"]) / 255
    graph = graph_of(path)
    values = {tensor.name: onnx.numpy_helper.to_array(tensor) for tensor in graph.initializer}
    in_the_file = []
    for node in graph.node:
        if node.op_type == "QuantizeLinear":
            scale = values[node.input[1]]
            if scale.size == 1:
                in_the_file.append(float(scale))

    for scale in learnt_scales:
        relative = (scale / torch.tensor(in_the_file) - 1).abs()
        assert relative.min() < 1e-4


def metrics_only(figures):
    return {name: value for name, value in figures.items() if "/" in name}


def test_masks_are_tested_but_for_their_loss(tmp_path):
    few = ["trainer.max_steps=2", "trainer.limit_val_batches=1", "model.width=4", "data.test=null"]
    run = trained(tmp_path / "run", *few, experiment=["segmentation"])
    _, expected = evaluate_run(run.config, run.path, "best", "val")
    del expected["val/loss"]  # class numbers have none

    path, facts = quantize_run(run, "static", tmp_path / "quantized", "inside", samples=32)

    before = metrics_only(facts["before"])
    after = metrics_only(facts["after"])

    assert before == pytest.approx(expected, abs=1e-3)
    assert after["val/miou"] == pytest.approx(expected["val/miou"], abs=0.05)
    assert evaluate_artefact(run.config, path) == ("val", after)  # without test data


def test_a_file_that_loses_too_much_accuracy_is_not_written(run, tmp_path, monkeypatch):
    accuracies = iter([0.9, 0.88])

    def measured(*_):
        return "test", {"test/accuracy": next(accuracies)}

    monkeypatch.setattr(quantization, "metrics_of", measured)

    with pytest.raises(ModelError, match=r"from 0\.9000 to 0\.8800"):
        quantize_run(run, out=tmp_path / "q", samples=32)
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def convolution_and_products():
    """Return a network most of whose weights are those of matrix products."""
    torch.manual_seed(0)
    layers = [
        nn.Conv2d(1, 2, 3),
        nn.Flatten(),
        nn.Linear(8, 300),
        nn.Linear(300, 3),
    ]
    nn.init.normal_(layers[2].weight)
    return nn.Sequential(*layers)


def test_the_method_follows_from_the_weights(run, convolution_and_products):
    assert method_for(convolution_and_products) == "dynamic"
    assert method_for(run.model()) == "static"


def test_dynamic_takes_matrix_products_only(convolution_and_products, tmp_path):
    network = convolution_and_products
    x = torch.randn(5, 1, 4, 4)
    single = tmp_path / "float.onnx"
    integers = tmp_path / "int.onnx"
    exportable = formats.Exportable(network_of(network), x, {})
    formats.save_onnx(formats.onnx_model(exportable), single, {"classes": ["a"]})
    made = integer_model(single, integers, None, {})
    formats.save_onnx(made, integers, {})

    kinds = [node.op_type for node in made.graph.node]
    types = {tensor.data_type for tensor in made.graph.initializer}

    assert kinds.count("MatMulInteger") == 2
    assert kinds.count("Conv") == 1
    assert onnx.TensorProto.INT8 not in types

    session, found = onnx_outputs(integers, x)
    metadata = session.get_modelmeta().custom_metadata_map
    with torch.no_grad():
        expected = network(x)
    error = (found["output"] - expected).abs().max()
    largest = expected.abs().max()

    assert metadata["classes"] == '["a"]'
    assert error < 0.05 * largest


VOLUMES = [  # a digit [1, 16, 16] as a volume [1, 4, 4, 16]
    "+transforms.train.fold={_target_: torch.nn.Unflatten, dim: 1, unflattened_size: [4, 4]}",
    "+transforms.eval.fold={_target_: torch.nn.Unflatten, dim: 1, unflattened_size: [4, 4]}",
    "model={_target_: regimen.models.sequential.from_layers, input_shape: [1, 4, 4, 16], "
    "layers: [{_target_: torch.nn.Conv3d, in_channels: 1, out_channels: 2, kernel_size: 3}, "
    "{_target_: torch.nn.Flatten}], num_classes: 10}",
]


def test_volumes_are_exported_whole(tmp_path):
    more = [*VOLUMES, "task.average_views=false", "trainer.channels_last=false"]
    run = trained(tmp_path / "run", *more, "trainer.max_steps=2", experiment=["resnet18"])
    path, facts = export_run(run, "onnx", tmp_path / "whole")
    assert facts["input"]["shape"] == ["batch", 1, 4, 4, 16]
    _, expected = evaluate_run(run.config, run.path, "best", "test")
    assert evaluate_artefact(run.config, path, "test")[1] == pytest.approx(expected, abs=1e-5)
    _, facts = quantize_run(run, "static", tmp_path / "q", samples=32, max_drop=1)
    assert facts["input"]["shape"] == ["batch", 1, 4, 4, 16]


def test_of_several_views_one_is_exported(tmp_path, monkeypatch):
    views = "+transforms.eval.views={_target_: regimen.data.transforms.Mirrored}"
    run = trained(tmp_path / "run", views, "trainer.max_steps=2")
    path, facts = export_run(run, "onnx", tmp_path / "views")
    assert facts["input"]["shape"] == ["batch", 1, 16, 16]
    _, expected = evaluate_run(run.config, run.path, "best", "test")
    assert evaluate_artefact(run.config, path, "test")[1] == pytest.approx(expected, abs=1e-5)
    _, facts = quantize_run(run, "static", tmp_path / "q", samples=32, max_drop=1)
    assert facts["input"]["shape"] == ["batch", 1, 16, 16]

    def gone(config, splits):
        raise DataError("data.root is gone")

    monkeypatch.setattr(artefact, "build_data", gone)
    _, facts = export_run(run, "onnx", tmp_path / "random")
    assert facts["input"]["shape"] == ["batch", 1, 16, 16]
