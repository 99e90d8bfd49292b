"""Exported models have the outputs of the model, or are not written."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn

from conf.check import parse
from data.transforms import Pipeline, Standardize, ToFloat
from scripts.cli.arguments import parse_arguments
from scripts.composition.compose import compose
from trainer.assembly.parts import Assembly, Known
from trainer.errors import ModelError
from trainer.export import artefact
from trainer.export.artefact import export_run
from trainer.export.card import how_to_load
from trainer.export.formats import Network, build_network, exported_program
from trainer.inference.facts import facts_of
from trainer.strategies.strategy import Strategy
from trainer.task import Task
from trainer.tasks.classification import Classification
from trainer.update.precision import Precision


def logits(run, inputs):
    with torch.no_grad():
        return run.model()(inputs)


def test_figures_are_those_of_the_checkpoint(run, tmp_path):
    best = run.trainer().state.global_step
    for step in (20, 40, 60):
        checkpoint = str(run.path / "checkpoints" / f"step-{step:08}.pt")
        made = export_run(run, "safetensors", tmp_path / f"{step}", checkpoint=checkpoint)
        found = read(made.folder)["provenance"]["results"]
        (validated,) = [n for n in run.metrics if n["step"] == step and "val/loss" in n]
        assert found["val/loss"] == validated["val/loss"]
        assert ("test/loss" in found) == (step == best)
        figures = (made.folder / "card.md").read_text().partition("## Metrics of the")[2]
        assert figures.startswith(f" checkpoint (step {step})")
        assert f"- val/loss: {validated['val/loss']:.4f}" in figures.partition("##")[0]


def read(path):
    return json.loads((path / "export.json").read_text())


def test_onnx_takes_any_batch_and_says_where_it_comes_from(run, tmp_path):
    onnx, onnxruntime = map(pytest.importorskip, ("onnx", "onnxruntime"))
    made = export_run(run, "onnx", tmp_path / "o")
    session = onnxruntime.InferenceSession(str(made.file))
    for size in (1, 5, 9):
        x = torch.randn(size, 1, 16, 16)
        found = session.run(None, {"input": x.numpy()})[0]
        torch.testing.assert_close(torch.from_numpy(found), logits(run, x), atol=1e-4, rtol=1e-4)
    (asked,), (answered,) = session.get_inputs(), session.get_outputs()
    assert (asked.name, asked.shape) == ("input", ["batch", 1, 16, 16])
    assert (answered.name, answered.shape) == ("output", ["batch", 10])
    metadata = session.get_modelmeta().custom_metadata_map
    assert json.loads(metadata["classes"]) == [str(digit) for digit in range(10)]
    origin = json.loads(metadata["provenance"])
    assert origin["step"] == run.trainer().state.global_step
    assert origin["config"] == (run.path / "config.yaml").read_text()
    assert [split["samples"] for split in origin["data"]] == [1257, 270, 270]
    card = (made.folder / "card.md").read_text()
    assert all(
        part in card for part in (origin["config"].rstrip(), "- Data: train: `data.", "1257")
    )
    assert sorted(path.name for path in made.folder.iterdir()) == [
        "card.md",
        "export.json",
        "model.onnx",
    ]
    notes = onnx.load(str(made.file)).graph.node[0].metadata_props
    assert not notes  # of the exporter, half of a small file


def test_preprocessing_inside_takes_bytes_and_gives_probabilities(run, tmp_path):
    onnxruntime = pytest.importorskip("onnxruntime")
    made = export_run(run, "onnx", tmp_path / "o", preprocessing="inside")
    session = onnxruntime.InferenceSession(str(made.file))
    pixels = np.random.default_rng(0).integers(0, 256, (4, 1, 16, 16), dtype=np.uint8)
    found = session.run(None, {"input": pixels})[0]
    by_hand = (torch.from_numpy(pixels).float() / 255 - 0.305) / 0.319
    expected = logits(run, by_hand).softmax(1)
    torch.testing.assert_close(torch.from_numpy(found), expected, atol=1e-5, rtol=0)
    facts = read(made.folder)
    assert facts["transforms_of_the_caller"] == {}
    assert facts["verified"]["difference_of_preprocessing"] < 1e-6
    assert facts["verified"]["samples"] == "of the run"


@pytest.mark.parametrize("name", ["onnx", "torch_export", "torchscript"])
def test_graphs_run_by_the_lines_of_the_card(run, tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)  # where the command was typed
    made = export_run(run, name, Path("o"))
    assert all(line in (made.folder / "card.md").read_text() for line in made.lines)
    for size in (1, 4):
        x = torch.randn(size, 1, 16, 16)
        names = {"x": x.numpy() if name == "onnx" else x}
        exec("\n".join(made.lines), names)
        found = torch.as_tensor(names["answers"][0] if name == "onnx" else names["answers"])
        torch.testing.assert_close(found, logits(run, x), atol=1e-4, rtol=1e-4)
    assert (made.remark != "") == (name == "torchscript")


class TwoHeads(nn.Module):
    def __init__(self):
        super().__init__()
        self.size, self.place = nn.Linear(16, 1), nn.Linear(16, 4)

    def forward(self, x):
        x = x.flatten(1)[:, :16]
        return {"size": self.size(x), "more": (self.place(x), None)}


def test_outputs_of_a_model_of_ones_own_have_names(run, tmp_path, monkeypatch):
    onnxruntime = pytest.importorskip("onnxruntime")
    torch.manual_seed(0)
    model = TwoHeads()
    monkeypatch.setattr(run, "model", lambda checkpoint: model)
    x = torch.randn(3, 1, 16, 16)
    expected = model(x)
    wanted = {"size": expected["size"], "more_output1": expected["more"][0]}
    for name in ("onnx", "torch_export", "torchscript"):
        made = export_run(run, name, tmp_path / name)
        if name == "onnx":
            session = onnxruntime.InferenceSession(str(made.file))
            names = [output.name for output in session.get_outputs()]
            found = dict(zip(names, session.run(None, {"input": x.numpy()}), strict=True))
        else:
            found = {"torch_export": lambda p: torch.export.load(p).module()}.get(
                name, torch.jit.load
            )(str(made.file))(x)
        assert list(found) == list(wanted)
        for key, value in wanted.items():
            torch.testing.assert_close(torch.as_tensor(found[key]), value, atol=1e-5, rtol=1e-5)


def test_weights_load_by_the_lines_that_are_printed(run, tmp_path):
    made = export_run(run, "safetensors", tmp_path / "o")
    names = {}
    exec("\n".join(made.lines), names)
    x = torch.randn(3, 1, 16, 16)
    found = names["model"].eval()(x)
    torch.testing.assert_close(found, logits(run, x), atol=1e-5, rtol=1e-5)
    assert (made.folder / "config.yaml").read_text() == (run.path / "config.yaml").read_text()
    with safe_open(made.file, "pt") as file:
        facts = json.loads(file.metadata()["regimen"])
    assert facts["provenance"]["step"] == run.trainer().state.global_step
    assert facts["classes"] == [str(digit) for digit in range(10)]


def test_lines_spell_nodes_within_nodes(tmp_path):
    layer = {"_target_": "torch.nn.Conv2d", "in_channels": 1, "out_channels": 2, "kernel_size": 3}
    layers = {"a": layer, "b": {"_target_": "torch.nn.Flatten"}}
    node = {"_target_": "models.sequential.from_layers", "layers": layers, "input_shape": [1, 4, 4]}
    tuned = {"_target_": "models.pretrained.fine_tune", "model": node, "weights": "gone.pt"}
    expected = nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten())
    weights = dict(zip(("a.weight", "a.bias"), expected.state_dict().values(), strict=True))
    save_file(weights, tmp_path / "model.safetensors")
    facts = {"format": "safetensors", "model": tuned, "file": "model.safetensors"}
    names = {}
    exec("\n".join(how_to_load(facts, tmp_path)), names)
    x = torch.randn(2, 1, 4, 4)
    assert torch.equal(names["model"](x), expected(x))


class Branches(nn.Module):
    def forward(self, x):
        return x.mean((2, 3)) if x.sum() > 0 else -x.mean((2, 3))


class BranchesInNumpy(nn.Module):
    def forward(self, x):
        return x.mean((2, 3)) if np.sum(x.numpy()) > 0 else -x.mean((2, 3))


@pytest.fixture
def of_both_signs(monkeypatch):
    """Let samples be such that the first ones take another branch than all together."""
    inputs = torch.ones(32, 1, 4, 4) * torch.linspace(-3, 1, 32)[:, None, None, None].flip(0)
    monkeypatch.setattr(artefact, "samples_of", lambda run, names: (inputs, True))
    return inputs


def test_a_branch_on_the_data_is_scripted(run, tmp_path, monkeypatch, of_both_signs):
    monkeypatch.setattr(run, "model", lambda checkpoint: Branches())
    network = torch.jit.load(str(export_run(run, "torchscript", tmp_path / "o").file))
    for inputs in (of_both_signs, of_both_signs[:1]):
        assert torch.equal(network(inputs), Branches()(inputs))


def test_a_file_with_other_outputs_is_not_written(run, tmp_path, monkeypatch, of_both_signs):
    monkeypatch.setattr(run, "model", lambda checkpoint: BranchesInNumpy())
    with pytest.raises(ModelError, match="outputs of"):
        export_run(run, "torchscript", tmp_path / "o")
    monkeypatch.setattr(run, "model", lambda checkpoint: Branches())
    with pytest.raises(ModelError, match=r"torch\.export"):
        export_run(run, "torch_export", tmp_path / "o")
    assert list(tmp_path.iterdir()) == []


def test_a_folder_is_replaced_only_when_asked(run, tmp_path):
    made = export_run(run, "safetensors", tmp_path / "o")
    (made.folder / "mine").touch()
    with pytest.raises(ModelError, match="overwrite=true"):
        export_run(run, "safetensors", tmp_path / "o")
    assert (made.folder / "mine").exists()
    export_run(run, "safetensors", tmp_path / "o", overwrite=True)
    assert not (made.folder / "mine").exists()
    (tmp_path / "of_others").mkdir()
    (tmp_path / "of_others" / "thesis").touch()
    with pytest.raises(ModelError, match="is no export"):
        export_run(run, "safetensors", tmp_path / "of_others", overwrite=True)
    assert (tmp_path / "of_others" / "thesis").exists()


def test_what_a_killed_command_left_is_removed(run):
    left = run.path / "exports" / ".tmp-left"
    left.mkdir(parents=True)
    (left / "model.onnx").touch()
    export_run(run, "safetensors")
    assert [path.name for path in left.parent.iterdir()] == ["safetensors"]


def test_without_the_data_it_is_verified_on_random_inputs(run, tmp_path, monkeypatch):
    from data.errors import DataError

    def gone(config, splits):
        raise DataError("data.root is gone")

    monkeypatch.setattr(artefact, "build_data", gone)
    made = export_run(run, "torchscript", tmp_path / "o")
    assert read(made.folder)["verified"]["samples"] == "random"


def test_a_transform_that_fits_no_graph_is_named():
    pipeline = Pipeline({"scale": ToFloat(), "odd": lambda x: x, "n": Standardize([0.5], [0.5])})
    task = Classification(10)
    with pytest.raises(ModelError, match=r"transforms\.eval\.odd"):
        build_network(nn.Identity(), task, pipeline, "inside")
    network, outside = build_network(nn.Identity(), task, pipeline, "outside")
    assert outside == ["scale", "odd", "n"]
    assert torch.equal(network(torch.ones(2, 10)), torch.ones(2, 10))


def test_the_facts_of_a_run_are_plain(run):
    from trainer.assembly.data import build_data

    data = build_data(run.config, ("val",))
    facts = facts_of(run.config, data, run.trainer().task)
    assert facts == run.facts
    assert facts.inputs == {"kind": "picture", "channels": 1, "size": [16, 16]}
    assert facts.model_inputs == {"shape": [1, 16, 16], "dtype": "float32"}


IMAGE = torch.randn(2, 1, 16, 16)
NETWORKS = [
    ("small_cnn", [], IMAGE),
    ("mlp", [], IMAGE),
    ("resnet18", [], IMAGE),
    ("vit_tiny", ["model.depth=2"], IMAGE),
    ("unet", ["data=digit_masks", "task=segmentation"], torch.randn(2, 1, 32, 32)),
    ("gpt_tiny", ["experiment=char_lm", "model.depth=2"], torch.randint(96, (2, 64))),
]


@pytest.mark.parametrize(("model", "more", "x"), [pytest.param(*n, id=n[0]) for n in NETWORKS])
def test_every_kind_of_network_of_ours_can_be_exported(model, more, x):
    composed = compose(parse_arguments(["experiment=resnet18", f"model={model}", *more]))
    config = parse(composed.config)
    classes = config.data.num_classes
    on_cpu = Strategy(torch.device("cpu"))
    built = Assembly(config, Known(classes), on_cpu, Precision("fp32", "cpu")).model
    network = Network(built, Task(), nn.Sequential(), interprets=False).eval()
    program = exported_program(network, x).module()
    for inputs in (x, x[:1], torch.cat([x, x])):
        with torch.no_grad():
            torch.testing.assert_close(program(inputs), built(inputs), atol=1e-5, rtol=1e-5)
