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
    words = [f"experiment={experiment[0]}", *experiment[1:], "trainer.max_epochs=3", *more]
    words += ["loader.num_workers=0", "callbacks.progress=null", f"run_dir={path}"]
    composed = compose(parse_arguments(words))
    assert train(RunRequest(composed.config, composed.overrides, {}, words)) == 0
    return load_run(path, "cpu")


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return trained(tmp_path_factory.mktemp("runs") / "run", "callbacks.checkpoint.save_top_k=-1")


def logits(run, inputs):
    with torch.no_grad():
        return run.model()(inputs)


def onnx_outputs(path, inputs):
    session = onnxruntime.InferenceSession(str(path))
    names = [output.name for output in session.get_outputs()]
    found = map(torch.from_numpy, session.run(None, {"input": np.asarray(inputs)}))
    return session, dict(zip(names, found, strict=True))


def test_figures_are_those_of_the_checkpoint(run, tmp_path):
    best = run.components().state.global_step
    for step in (20, 40, 60):
        checkpoint = str(run.path / "checkpoints" / f"step-{step:08}.pt")
        path, facts = export_run(run, "safetensors", tmp_path / f"{step}", checkpoint=checkpoint)
        found = facts["provenance"]["results"]
        (validated,) = [n for n in run.metrics if n["step"] == step and "val/loss" in n]
        assert found["val/loss"] == validated["val/loss"]
        assert ("test/loss" in found) == (step == best)
        card = path.with_name("card.md").read_text()
        figures = card.partition(f"## Metrics of the checkpoint (step {step})")[2]
        assert f"- val/loss: {validated['val/loss']:.4f}" in figures.partition("##")[0]
        about = yaml.safe_load(card.split("```yaml\n")[1].partition("```")[0])
        assert [line["step"] for line in about["validations"]] == [20, 40, 60]
    assert path.with_name("config.yaml").read_text() == (run.path / "config.yaml").read_text()
    with safe_open(path, "pt") as file:
        told = json.loads(file.metadata()["regimen"])
    assert told["provenance"] == facts["provenance"]
    assert told["classes"] == [str(digit) for digit in range(10)]


def says_where_it_comes_from(run, path, facts):
    session, _ = onnx_outputs(path, torch.zeros(1, 1, 16, 16))
    ends = [(end.name, end.shape) for end in (*session.get_inputs(), *session.get_outputs())]
    assert ends == [("input", ["batch", 1, 16, 16]), ("output", ["batch", 10])]
    metadata = session.get_modelmeta().custom_metadata_map
    assert json.loads(metadata["classes"]) == [str(digit) for digit in range(10)]
    origin = json.loads(metadata["provenance"])
    assert origin == facts["provenance"]
    assert origin["step"] == run.components().state.global_step
    assert origin["config"] == (run.path / "config.yaml").read_text()
    assert [split["samples"] for split in origin["data"]] == [1257, 270, 270]
    card = path.with_name("card.md").read_text()
    for part in (origin["config"].rstrip(), f"sha256: {origin['sha256']}", "samples: 1257"):
        assert part in card
    assert json.loads(path.with_name("export.json").read_text()) == facts
    assert {p.name for p in path.parent.iterdir()} == {"card.md", "export.json", "model.onnx"}
    nodes = onnx.load(str(path)).graph.node
    assert not nodes[0].metadata_props  # the exporter's notes, half of a small file


def test_preprocessing_inside_takes_bytes_and_gives_probabilities(run, tmp_path):
    path, facts = export_run(run, "onnx", tmp_path / "o", preprocessing="inside")
    pixels = np.random.default_rng(0).integers(0, 256, (4, 1, 16, 16), dtype=np.uint8)
    _, found = onnx_outputs(path, pixels)
    by_hand = (torch.from_numpy(pixels).float() / 255 - 0.305) / 0.319
    expected = logits(run, by_hand).softmax(1)
    torch.testing.assert_close(found["output"], expected, atol=1e-5, rtol=0)
    assert facts["transforms_of_the_caller"] == {}
    assert facts["verified"]["samples"] == "of the run"
    _, expected = evaluate_run(run.config, run.path, "best", None)
    split, found = evaluate_artefact(run.config, path)
    assert split == "test"
    assert found == pytest.approx(expected, abs=1e-4)


FORMATS = [name for name in get_args(Format) if name not in FOLDERS]
QUICK = [pytest.param(n, marks=[compiled, pytest.mark.slow]) if n == "aoti" else n for n in FORMATS]


@pytest.mark.parametrize("name", QUICK)
def test_the_lines_of_the_card_run_a_file_with_the_metrics_of_the_run(
    run, tmp_path, monkeypatch, name
):
    monkeypatch.chdir(tmp_path)  # where the command was typed
    assert set(FORMATS) == {*formats.GRAPHS, "safetensors"}
    path, facts = export_run(run, name, Path("o"))
    lines = formats.how_to_load(facts, path.parent)
    assert all(line in path.with_name("card.md").read_text() for line in lines)
    for size in (1, 4):
        x = torch.randn(size, 1, 16, 16)
        names = {"x": x.numpy() if name == "onnx" else x}
        exec("\n".join(lines), names)
        if name == "safetensors":
            names["answers"] = names["model"].eval()(x)
        found = names["answers"][0] if name == "onnx" else names["answers"]
        torch.testing.assert_close(torch.as_tensor(found), logits(run, x), atol=1e-4, rtol=1e-4)
    notes = " ".join(facts.get("notes", []))
    assert ("deprecated" in notes) == (name == "torchscript")
    assert ("machine code" in notes) == (name == "aoti")
    if name == "onnx":
        says_where_it_comes_from(run, path, facts)
    _, expected = evaluate_run(run.config, run.path, "best", None)
    _, found = evaluate_artefact(run.config, path, "test", allow_code=True)
    assert found == pytest.approx(expected, abs=1e-4)


def test_lines_make_nodes_within_nodes(tmp_path):
    layer = {"_target_": "torch.nn.Conv2d", "in_channels": 1, "out_channels": 2, "kernel_size": 3}
    layers = {"a": layer, "b": {"_target_": "torch.nn.Flatten"}}
    node = {
        "_target_": "regimen.models.sequential.from_layers",
        "layers": layers,
        "input_shape": [1, 4, 4],
    }
    tuned = {"_target_": "regimen.models.pretrained.fine_tune", "model": node, "weights": "gone.pt"}
    expected = nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten())
    weights = dict(zip(("a.weight", "a.bias"), expected.state_dict().values(), strict=True))
    save_file(weights, tmp_path / "model.safetensors")
    facts = {"format": "safetensors", "model": tuned, "file": "model.safetensors"}
    names = {}
    exec("\n".join(formats.how_to_load(facts, tmp_path)), names)
    x = torch.randn(2, 1, 4, 4)
    assert torch.equal(names["model"](x), expected(x))


class TwoHeads(nn.Module):
    def forward(self, x):
        return {"size": x.mean((1, 2, 3)), "more": (x.flatten(1)[:, :4].sin(), None)}


@pytest.mark.parametrize("name", ["onnx", "torch_export", "torchscript"])
def test_outputs_of_a_model_of_ones_own_have_names(run, tmp_path, monkeypatch, name):
    monkeypatch.setattr(run, "model", lambda checkpoint: TwoHeads())
    x = torch.randn(3, 1, 16, 16)
    path, _ = export_run(run, name, tmp_path / name)
    found = onnx_outputs(path, x)[1] if name == "onnx" else formats.GRAPHS[name].load(path)(x)
    assert list(found) == ["size", "more_output1"]
    expected = TwoHeads()(x)
    for value, wanted in zip(found.values(), (expected["size"], expected["more"][0]), strict=True):
        torch.testing.assert_close(value, wanted, atol=1e-5, rtol=1e-5)


class Branches(nn.Module):
    def forward(self, x):
        return x.mean((2, 3)) if x.sum() > 0 else -x.mean((2, 3))


class BranchesInNumpy(Branches):
    def forward(self, x):
        return x.mean((2, 3)) if np.sum(x.numpy()) > 0 else -x.mean((2, 3))


def test_a_branch_is_scripted_or_no_file_is_written(run, tmp_path, monkeypatch):
    inputs = torch.ones(32, 1, 4, 4) * torch.linspace(-3, 1, 32)[:, None, None, None].flip(0)
    # The first samples take another branch than all together.
    monkeypatch.setattr(artefact, "samples_of", lambda run, names: (inputs, True))
    monkeypatch.setattr(run, "model", lambda checkpoint: BranchesInNumpy())
    with pytest.raises(ModelError, match="outputs of"):
        export_run(run, "torchscript", tmp_path / "o")
    monkeypatch.setattr(run, "model", lambda checkpoint: Branches())
    with pytest.raises(ModelError, match=r"torch\.export"):
        export_run(run, "torch_export", tmp_path / "o")
    assert list(tmp_path.iterdir()) == []
    network = torch.jit.load(str(export_run(run, "torchscript", tmp_path / "o")[0]))
    for some in (inputs, inputs[:1]):
        assert torch.equal(network(some), Branches()(some))


def test_a_folder_is_replaced_only_when_asked(run, tmp_path):
    folder = export_run(run, "safetensors", tmp_path / "o")[0].parent
    (others := tmp_path / "of_others").mkdir()
    for place, overwrite in ((folder, False), (others, True)):
        (place / "mine").touch()
        with pytest.raises(ModelError, match="overwrite=true replaces it if it holds"):
            export_run(run, "safetensors", place, overwrite=overwrite)
        assert (place / "mine").exists()
    export_run(run, "safetensors", folder, overwrite=True)
    assert not (folder / "mine").exists()
    left = run.path / "exports" / ".tmp-safetensors"  # by a command that was killed
    left.mkdir(parents=True)
    (left / "model.onnx").touch()
    export_run(run, "safetensors")
    assert [path.name for path in left.parent.iterdir()] == ["safetensors"]


def test_without_the_data_it_is_verified_on_random_inputs(run, tmp_path, monkeypatch):
    def gone(config, splits):
        raise DataError("data.root is gone")

    monkeypatch.setattr(artefact, "build_data", gone)
    for preprocessing in ("outside", "inside"):
        _, facts = export_run(run, "torchscript", tmp_path / preprocessing, preprocessing)
        assert facts["verified"]["samples"] == "random"


def test_a_transform_that_fits_no_graph_is_named():
    pipeline = Pipeline({"scale": ToFloat(), "odd": lambda x: x, "n": Standardize([0.5], [0.5])})
    with pytest.raises(ModelError, match=r"transforms\.eval\.odd"):
        formats.build_network(nn.Identity(), Classification(10), pipeline, "inside")


def test_files_that_run_code_or_were_changed_are_not_loaded(run, tmp_path):
    path, _ = export_run(run, "torchscript", tmp_path / "ts")
    whole, none = path.read_bytes(), run.path / "config.yaml"
    for place, content, allow_code, told in (
        (path, whole, False, "allow_code=true"),
        (path, whole + b"more", True, "not the file"),
        (none, none.read_bytes(), True, r"export\.json"),
    ):
        place.write_bytes(content)
        with pytest.raises(ModelError, match=told):
            evaluate_artefact(run.config, place, "test", allow_code)


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
        pytest.param({"model": {"hidden": 10**9}}, "cannot be loaded", id="a huge network"),
    ],
)
def test_facts_beside_a_file_of_another_form_are_named(run, tmp_path, change, told):
    path, _ = export_run(run, "safetensors", tmp_path / "weights")
    facts = json.loads((path.parent / "export.json").read_text())
    if isinstance(change.get("model"), dict):
        layers = {"_target_": "torch.nn.Linear", "in_features": 10**6, "out_features": 10**9}
        change = {"model": layers}
    facts = {k: v for k, v in (facts | change).items() if v is not None or k == "classes"}
    (path.parent / "export.json").write_text(json.dumps(facts))
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
    config = parse(compose(["experiment=resnet18", f"model={model}", *more]).config)
    built = Assembly(config, Strategy("cpu"), config.data.num_classes).model
    program = formats.exported_program(
        formats.Exportable(formats.Network(built, Task()), x, {})
    ).module()
    for inputs in (x, x[:1], torch.cat([x, x])):
        with torch.no_grad():
            torch.testing.assert_close(program(inputs), built(inputs), atol=1e-5, rtol=1e-5)


@pytest.mark.slow
@compiled
def test_the_loader_of_the_docs_answers_as_the_model_does(tmp_path):
    assert len(SOURCE.read_text().splitlines()) <= 30
    torch.manual_seed(0)
    graph = formats.Exportable(formats.Network(SmallCNN(10), Task()), torch.randn(2, 1, 16, 16), {})
    formats.GRAPHS["torchscript"].write(graph, tmp_path / "model.ts")
    paths, loader = cpp_extension.library_paths(), str(tmp_path / "load_torchscript")
    flags = [f"-I{path}" for path in cpp_extension.include_paths()]
    flags += [f"{way}{path}" for path in paths for way in ("-L", "-Wl,-rpath,")]
    flags += ["-ltorch", "-ltorch_cpu", "-lc10", "-o", loader]
    subprocess.run(["g++", "-std=c++20", str(SOURCE), *flags], check=True)
    done, wrong = (
        subprocess.run([loader, str(path), "1", "16", "16"], capture_output=True, text=True)
        for path in (tmp_path / "model.ts", SOURCE)
    )
    found = torch.tensor([float(line) for line in done.stdout.splitlines()])
    with torch.no_grad():
        expected = graph.network(torch.zeros(1, 1, 16, 16))[0]
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)
    assert (done.returncode, wrong.returncode, wrong.stderr[:7]) == (0, 1, "error: ")


def test_static_integers_lose_at_most_a_point(run, tmp_path):
    path, facts = quantize_run(run, out=tmp_path / "static")
    before, after = facts["before"], facts["after"]
    assert after["test/accuracy"] >= before["test/accuracy"] - 0.01 > 0.89
    assert after["megabytes"] < 0.5 * before["megabytes"]
    told = {"method": "static", "weights": "uint8", "ranges": "of training samples"}
    told |= {"activations": "uint8", "calibration_samples": 512}
    assert facts["quantization"] == told
    assert {p.name for p in path.parent.iterdir()} == {"card.md", "export.json", "model.onnx"}
    assert facts["provenance"]["run"] == str(run.path)
    assert "calibration_samples: 512" in path.with_name("card.md").read_text()
    graph = onnx.load(str(path)).graph
    kinds = {i.name: i.data_type for i in graph.initializer}
    weights = [n.input[0] for n in graph.node if n.op_type == "DequantizeLinear"]
    unsigned, of_biases = onnx.TensorProto.UINT8, onnx.TensorProto.INT32
    assert {kinds[name] for name in weights if name in kinds} == {unsigned, of_biases}
    assert onnx.TensorProto.FLOAT not in {kinds[i.name] for i in graph.initializer if i.dims[1:]}
    found = evaluate_artefact(run.config, path)
    assert found == ("test", {k: v for k, v in after.items() if k.startswith("test/")})


def test_calibration_sees_the_first_samples_of_the_seed(run):
    names = list(run.config.transforms.eval)
    few, every = ([b["input"] for b in calibration(run.config, names, n)] for n in (64, 10_000))
    assert [len(batch) for batch in few] == [32, 32]
    assert all((a == b).all() for a, b in zip(few, every, strict=False))
    assert sum(map(len, every)) == 1257
    assert min(batch.min() for batch in every) == pytest.approx((0 - 0.305) / 0.319)


def test_a_network_trained_for_8_bits_answers_as_it_did_in_training(run, tmp_path):
    qat = trained(tmp_path / "qat", "callbacks=[default,qat]")
    names = [list(r.components().model.state_dict()) for r in (run, qat)]
    assert names[0] == names[1]  # plain weights
    path, facts = quantize_run(qat, out=tmp_path / "q")
    assert facts["quantization"]["ranges"] == "learnt in training"
    assert facts["after"]["test/accuracy"] >= facts["before"]["test/accuracy"] - 0.005
    samples, _ = samples_of(qat, list(qat.config.transforms.eval))
    payload = torch.load(qat.path / "checkpoints" / "best.pt", weights_only=True)
    learnt, model = payload["callbacks"]["qat"], qat.model()
    rounding = QuantizationAwareTraining()
    rounding.check(model)
    rounding.load_state_dict(learnt)
    rounding.attach(model)
    with torch.inference_mode():
        expected = model(samples)
    rounding.teardown(None)
    found = onnx_outputs(path, samples)[1]["output"]
    assert torch.equal(found.argmax(1), expected.argmax(1))
    assert (found - expected).square().mean().sqrt() < 0.02 * expected.abs().max()
    graph = onnx.load(str(path)).graph
    values = {i.name: onnx.numpy_helper.to_array(i) for i in graph.initializer}
    scales = [values[n.input[1]] for n in graph.node if n.op_type == "QuantizeLinear"]
    given = torch.tensor([float(scale) for scale in scales if scale.size == 1])
    state = learnt["fake_quantization"]
    for scale in (state["high"] - state["low"]) / 255:
        assert (scale / given - 1).abs().min() < 1e-4


def test_masks_are_tested_but_for_their_loss(tmp_path):
    few = ["trainer.max_steps=2", "trainer.limit_val_batches=1", "model.width=4", "data.test=null"]
    run = trained(tmp_path / "run", *few, experiment=["segmentation"])
    _, expected = evaluate_run(run.config, run.path, "best", "val")
    del expected["val/loss"]  # class numbers have none
    path, facts = quantize_run(run, "static", tmp_path / "quantized", "inside", samples=32)
    before, after = ({k: v for k, v in facts[w].items() if "/" in k} for w in ("before", "after"))
    assert before == pytest.approx(expected, abs=1e-3)
    assert after["val/miou"] == pytest.approx(expected["val/miou"], abs=0.05)
    assert evaluate_artefact(run.config, path) == ("val", after)  # without test data


def test_a_file_that_loses_too_much_accuracy_is_not_written(run, tmp_path, monkeypatch):
    values = iter([0.9, 0.88])
    measured = lambda *_: ("test", {"test/accuracy": next(values)})  # noqa: E731
    monkeypatch.setattr(quantization, "metrics_of", measured)
    with pytest.raises(ModelError, match=r"from 0\.9000 to 0\.8800"):
        quantize_run(run, out=tmp_path / "q", samples=32)
    assert list(tmp_path.iterdir()) == []


def test_dynamic_takes_matrix_products_only(run, tmp_path):
    torch.manual_seed(0)
    network = nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten(), nn.Linear(8, 300), nn.Linear(300, 3))
    torch.nn.init.normal_(network[2].weight)
    assert method_for(network) == "dynamic"
    assert method_for(run.model()) == "static"
    x = torch.randn(5, 1, 4, 4)
    proto = formats.onnx_model(formats.Exportable(formats.Network(network, Task()), x, {}))
    formats.save_onnx(proto, tmp_path / "float.onnx", {"classes": ["a"]})
    made = integer_model(tmp_path / "float.onnx", tmp_path / "int.onnx", None, {})
    formats.save_onnx(made, tmp_path / "int.onnx", {})
    kinds = [node.op_type for node in made.graph.node]
    assert (kinds.count("MatMulInteger"), kinds.count("Conv")) == (2, 1)
    assert onnx.TensorProto.INT8 not in {i.data_type for i in made.graph.initializer}
    session, found = onnx_outputs(tmp_path / "int.onnx", x)
    assert session.get_modelmeta().custom_metadata_map["classes"] == '["a"]'
    with torch.no_grad():
        expected = network(x)
    assert (found["output"] - expected).abs().max() < 0.05 * expected.abs().max()


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
