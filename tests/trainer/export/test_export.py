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
from trainer.build.assembly import Assembly, Known
from trainer.errors import ModelError
from trainer.export import artefact
from trainer.export.artefact import export_run
from trainer.export.formats import exported_program
from trainer.export.lines import how_to_load
from trainer.export.network import Network, build_network
from trainer.inference.facts import facts_of
from trainer.inference.run import load_run
from trainer.strategies.strategy import Strategy
from trainer.task import Task
from trainer.tasks.classification import Classification
from trainer.update.precision import Precision


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run's directory as two updates leave it."""
    from scripts.cli.request import Request
    from scripts.runs.run import run as train

    path = tmp_path_factory.mktemp("runs") / "run"
    words = ["experiment=resnet18", "model=small_cnn", "trainer.max_steps=2", f"run_dir={path}"]
    composed = compose(parse_arguments([*words, "loader.num_workers=0", "callbacks.progress=null"]))
    assert train(Request(composed.config, composed.overrides, {}, words)) == 0
    return load_run(path, "cpu")


def logits(run, inputs):
    with torch.no_grad():
        return run.model()(inputs)


def read(path):
    return json.loads((path / "export.json").read_text())


def test_onnx_takes_any_batch_and_says_where_it_comes_from(run, tmp_path):
    onnxruntime = pytest.importorskip("onnxruntime")
    made = export_run(run, "onnx", tmp_path / "o")
    session = onnxruntime.InferenceSession(str(made.file))
    for size in (1, 5, 9):
        x = torch.randn(size, 1, 16, 16)
        found = session.run(None, {"input": x.numpy()})[0]
        torch.testing.assert_close(torch.from_numpy(found), logits(run, x), atol=1e-4, rtol=1e-4)
    metadata = session.get_modelmeta().custom_metadata_map
    assert json.loads(metadata["classes"]) == [str(digit) for digit in range(10)]
    origin = json.loads(metadata["provenance"])
    assert origin["step"] == 2
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


@pytest.mark.parametrize(
    ("name", "load"),
    [
        pytest.param("torch_export", lambda p: torch.export.load(p).module(), id="torch_export"),
        pytest.param("torchscript", torch.jit.load, id="torchscript"),
    ],
)
def test_programs_of_torch_load_again(run, tmp_path, monkeypatch, name, load):
    monkeypatch.chdir(tmp_path)  # where the command was typed, not where the file is loaded
    made = export_run(run, name, Path("o"))
    network = load(str(made.file))
    for size in (1, 4):
        x = torch.randn(size, 1, 16, 16)
        torch.testing.assert_close(network(x), logits(run, x), atol=1e-5, rtol=1e-5)
    assert (made.remark != "") == (name == "torchscript")


def test_weights_load_by_the_lines_that_are_printed(run, tmp_path):
    made = export_run(run, "safetensors", tmp_path / "o")
    names = {}
    exec("\n".join(how_to_load(made.folder)), names)
    x = torch.randn(3, 1, 16, 16)
    found = names["model"].eval()(x)
    torch.testing.assert_close(found, logits(run, x), atol=1e-5, rtol=1e-5)
    assert (made.folder / "config.yaml").read_text() == (run.path / "config.yaml").read_text()
    with safe_open(made.file, "pt") as file:
        facts = json.loads(file.metadata()["regimen"])
    assert facts["provenance"]["step"] == 2
    assert facts["classes"] == [str(digit) for digit in range(10)]


def test_lines_spell_nodes_within_nodes(tmp_path):
    layer = {"_target_": "torch.nn.Conv2d", "in_channels": 1, "out_channels": 2, "kernel_size": 3}
    layers = {"a": layer, "b": {"_target_": "torch.nn.Flatten"}}
    node = {"_target_": "models.sequential.from_layers", "layers": layers, "input_shape": [1, 4, 4]}
    tuned = {"_target_": "models.pretrained.fine_tune", "model": node, "weights": "gone.pt"}
    expected = nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten())
    weights = dict(zip(("a.weight", "a.bias"), expected.state_dict().values(), strict=True))
    save_file(weights, tmp_path / "model.safetensors")
    facts = {"model": tuned, "file": "model.safetensors"}
    (tmp_path / "export.json").write_text(json.dumps(facts))
    names = {}
    exec("\n".join(how_to_load(tmp_path)), names)
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
    from trainer.build.data import build_data

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
