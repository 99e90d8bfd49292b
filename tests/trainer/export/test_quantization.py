"""Quantized models lose little accuracy, match the rounding network, and can be evaluated."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

from scripts.cli.arguments import parse_arguments
from scripts.composition.compose import compose
from scripts.export import FORMATS as COMMAND_FORMATS
from trainer.errors import ModelError
from trainer.export import artefact, quantization
from trainer.export.artefact import WEIGHTS, export_run, samples_of
from trainer.export.calibration import calibrated, learnt
from trainer.export.evaluation import evaluate_artefact
from trainer.export.fake_quantization import Ranges, attach, rounded_weight
from trainer.export.formats import FORMATS
from trainer.export.integers import integer_network
from trainer.export.places import find_places
from trainer.export.quantization import method_for, quantize_run
from trainer.inference.evaluation import evaluate_run
from trainer.inference.run import load_run

onnx = pytest.importorskip("onnx")
onnxruntime = pytest.importorskip("onnxruntime")


SMALL = ("resnet18", "model=small_cnn", "optimizer=sgd_nesterov", "optimizer.lr=0.2")


def trained(path, *more, experiment=SMALL):
    """Train a small network for three epochs, on the digits if nothing else is said."""
    from scripts.cli.request import Request
    from scripts.runs.run import run as train

    words = [
        f"experiment={experiment[0]}",
        *experiment[1:],
        "trainer.max_epochs=3",
        "loader.num_workers=0",
        *more,
        "callbacks.progress=null",
        f"run_dir={path}",
    ]
    composed = compose(parse_arguments(words))
    assert train(Request(composed.config, composed.overrides, {}, words)) == 0
    return load_run(path, "cpu")


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return trained(tmp_path_factory.mktemp("runs") / "plain")


@pytest.fixture(scope="module")
def qat(tmp_path_factory):
    return trained(tmp_path_factory.mktemp("runs") / "qat", "callbacks=[default,qat]")


@pytest.fixture(scope="module")
def static(run, tmp_path_factory):
    return quantize_run(run, out=tmp_path_factory.mktemp("made") / "static")


def test_static_integers_lose_at_most_a_point(run, static):
    assert static.method == "static"
    assert not static.learnt
    assert static.before["test/accuracy"] > 0.9
    assert static.after["test/accuracy"] >= static.before["test/accuracy"] - 0.01
    assert static.after["megabytes"] < static.before["megabytes"]
    facts = json.loads((static.folder / "export.json").read_text())
    assert facts["before"] == static.before
    assert facts["quantization"]["calibration_samples"] == 512
    assert facts["provenance"]["run"] == str(run.path)
    assert "| test/accuracy | 0.9" in (static.folder / "card.md").read_text()
    graph = onnx.load(str(static.file)).graph
    kinds = {i.name: i.data_type for i in graph.initializer}
    weights = [n.input[0] for n in graph.node if n.op_type == "DequantizeLinear"]
    assert onnx.TensorProto.INT8 in {kinds.get(name) for name in weights}
    assert onnx.TensorProto.FLOAT not in {kinds[i.name] for i in graph.initializer if i.dims[1:]}


def test_calibration_sees_the_first_samples_of_the_seed_and_is_repeatable(run):
    model = run.model()
    found = [calibrated(run, model, "best", 64) for _ in range(2)]
    assert torch.equal(found[0].low, found[1].low)
    assert torch.equal(found[0].high, found[1].high)
    everything = calibrated(run, model, "best", 10_000)
    first = everything.places.names.index("input:features.0.conv")
    assert everything.low[first] == pytest.approx((0 - 0.305) / 0.319)
    assert everything.high[first] == pytest.approx((1 - 0.305) / 0.319)


def test_a_network_trained_for_8_bits_answers_as_it_did_in_training(qat, tmp_path):
    made = quantize_run(qat, out=tmp_path / "q")
    assert made.learnt
    assert made.after["test/accuracy"] >= made.before["test/accuracy"] - 0.005
    samples, _ = samples_of(qat, list(qat.config.transforms.eval))
    model = qat.model()
    ranges = learnt(qat, model, "best", samples[:2])
    detach = attach(model, ranges)
    with torch.inference_mode():
        expected = model(samples)
    detach()
    session = onnxruntime.InferenceSession(str(made.file))
    found = torch.from_numpy(session.run(None, {"input": samples.numpy()})[0])
    assert torch.equal(found.argmax(1), expected.argmax(1))
    off = (found - expected).square().mean().sqrt() / expected.abs().max()
    assert off < 0.01


def test_checkpoints_of_8_bit_training_hold_plain_weights(run, qat):
    names = [list(r.trainer().model.state_dict()) for r in (run, qat)]
    assert names[0] == names[1]
    assert learnt(run, run.model(), "best", None) is None


@pytest.fixture
def unverified(monkeypatch):
    """Leave out the comparison in new processes, of which test_export.py is."""
    monkeypatch.setattr(artefact, "_verify", lambda *_: 0.0)


@pytest.mark.parametrize("preprocessing", ["outside", "inside"])
def test_every_format_is_tested_by_the_metrics_of_the_run(run, tmp_path, preprocessing, unverified):
    expected = evaluate_run(run.config, run.path, "best", "test")
    assert set(COMMAND_FORMATS) == {*FORMATS, WEIGHTS}
    quick = [name for name in COMMAND_FORMATS if name != "aoti"]  # compiling takes a minute
    names = ["onnx"] if preprocessing == "inside" else quick
    for name in names:
        made = export_run(run, name, tmp_path / name, preprocessing)
        found = evaluate_artefact(run.config, made.file, "test", allow_code=True)
        assert found.keys() == expected.keys()
        for metric, value in expected.items():
            assert found[metric] == pytest.approx(value, abs=1e-4), name


def test_masks_of_a_file_have_the_metrics_of_the_run(tmp_path, unverified):
    run = trained(
        tmp_path / "run", "trainer.max_steps=2", "model.width=4", experiment=["segmentation"]
    )
    expected = evaluate_run(run.config, run.path, "best", "test")
    del expected["test/loss"]  # class numbers have none
    made = export_run(run, "onnx", tmp_path / "onnx", "inside")
    found = evaluate_artefact(run.config, made.file, "test")
    assert found == pytest.approx(expected, abs=1e-3)
    quantized = quantize_run(run, "static", tmp_path / "quantized", "inside", samples=32)
    assert quantized.after["test/miou"] == pytest.approx(expected["test/miou"], abs=0.05)


def test_a_quantized_file_is_tested_in_the_same_way(run, static):
    found = evaluate_artefact(run.config, static.file, "test")
    assert found["test/accuracy"] == static.after["test/accuracy"]


WITHOUT_TORCH = """
import sys
sys.modules["torch"] = None
from scripts.predict import main
sys.argv = ["predict", *sys.argv[1:]]
main()
"""


def predicted(model, *words, cwd):
    command = [sys.executable, "-c", WITHOUT_TORCH, f"model={model}", *words]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False)


def test_a_file_predicts_where_torch_is_not_installed(run, tmp_path, unverified):
    made = export_run(run, "onnx", tmp_path / "onnx")
    (tmp_path / "pictures").mkdir()
    noise = np.random.default_rng(0).integers(0, 256, (5, 8, 12, 3), dtype=np.uint8)
    for number, pixels in enumerate(noise):
        Image.fromarray(pixels).save(tmp_path / "pictures" / f"{number}.png")
    done = predicted(made.file, "source=pictures", "top_k=2", "out=out.jsonl", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    files = [row.pop("file") for row in rows]
    assert [Path(name).name for name in files] == [f"{number}.png" for number in range(5)]
    for found, expected in zip(
        rows, run.predict([tmp_path / f for f in files], top_k=2), strict=True
    ):
        assert found.keys() == expected.keys()
        for key, value in expected.items():
            assert found[key] == (pytest.approx(value, abs=1e-4) if "prob" in key else value)


def test_broken_pictures_and_words_end_a_prediction_without_torch(static, tmp_path):
    (tmp_path / "a.png").write_bytes(b"no picture")
    Image.new("L", (16, 16)).save(tmp_path / "b.png")
    assert predicted(static.file, "source=a.png", cwd=tmp_path).returncode == 3
    done = predicted(static.file, "source=.", "on_error=skip", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    lines = (tmp_path / "predictions.csv").read_text().splitlines()
    assert lines[1].startswith("a.png,,,cannot decode a.png")
    assert lines[2].startswith("b.png,")
    done = predicted(static.file, "source=.", "colour=red", "top_k=0", cwd=tmp_path)
    assert done.returncode == 2
    assert all(word in done.stderr for word in ("colour", "top_k", "predictions.csv exists"))


def test_files_that_run_code_or_were_changed_are_not_loaded(run, tmp_path, unverified):
    made = export_run(run, "torchscript", tmp_path / "ts")
    with pytest.raises(ModelError, match="allow_code=true"):
        evaluate_artefact(run.config, made.file, "test")
    with made.file.open("ab") as file:
        file.write(b"more")
    with pytest.raises(ModelError, match="not the file"):
        evaluate_artefact(run.config, made.file, "test", allow_code=True)
    with pytest.raises(ModelError, match=r"export\.json"):
        evaluate_artefact(run.config, run.path / "config.yaml", "test")


def test_a_file_that_loses_too_much_accuracy_is_not_written(run, tmp_path, monkeypatch):
    values = iter([{"test/accuracy": 0.9}, {"test/accuracy": 0.88}])
    monkeypatch.setattr(quantization, "_metrics", lambda *_: next(values))
    with pytest.raises(ModelError, match=r"from 0\.9000 to 0\.8800"):
        quantize_run(run, out=tmp_path / "q")
    assert list(tmp_path.iterdir()) == []


def test_dynamic_takes_matrix_products_only(run, tmp_path):
    network = nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten(), nn.Linear(8, 300), nn.Linear(300, 3))
    torch.nn.init.normal_(network[2].weight)
    assert method_for(network) == "dynamic"
    assert method_for(run.model()) == "static"
    network.eval()
    x = torch.randn(5, 1, 4, 4)
    form = quantization.FORMATS["onnx"]
    form.write(network, x[:2].clone(), tmp_path / "float.onnx", {"classes": ["a"]})
    quantization._write_dynamic(tmp_path / "float.onnx", tmp_path / "int.onnx")
    kinds = [node.op_type for node in onnx.load(str(tmp_path / "int.onnx")).graph.node]
    assert kinds.count("MatMulInteger") == 2
    assert kinds.count("Conv") == 1
    session = onnxruntime.InferenceSession(str(tmp_path / "int.onnx"))
    assert session.get_modelmeta().custom_metadata_map["classes"] == '["a"]'
    with torch.no_grad():
        expected = network(x)
    (found,) = session.run(None, {"input": x.numpy()})
    assert (torch.from_numpy(found) - expected).abs().max() < 0.05 * expected.abs().max()


class Residual(nn.Module):
    """What blocks are made of: a shortcut, a reused activation, dropout, pooling."""

    def __init__(self):
        super().__init__()
        self.conv1, self.bn1, self.act1 = (
            nn.Conv2d(2, 4, 3, padding=1),
            nn.BatchNorm2d(4),
            nn.ReLU(),
        )
        self.conv2, self.bn2 = nn.Conv2d(4, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4)
        self.act1 = nn.ReLU()
        self.act2, self.pool, self.flatten = nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()
        self.dropout, self.head = nn.Dropout(0.5), nn.Linear(4, 3)
        self.shared = nn.Linear(3, 3)

    def forward(self, x):
        x = self.act1(self.bn1(self.conv1(x)))
        x = self.act2(self.bn2(self.conv2(x)) + x)
        return self.shared(self.shared(self.head(self.dropout(self.flatten(self.pool(x))))))


def residual():
    torch.manual_seed(0)
    model = Residual().eval()
    for weight in (p for p in model.parameters() if p.ndim > 1):
        nn.init.normal_(weight)
    for norm in (model.bn1, model.bn2):
        nn.init.uniform_(norm.weight, 0.5, 1.5)
        nn.init.normal_(norm.bias)
        norm.running_mean.normal_()
        norm.running_var.uniform_(0.5, 2)
    return model


def test_the_places_of_a_block():
    model = residual().train()
    places = find_places(model, lambda model: model(torch.randn(2, 2, 5, 5)))
    assert model.training
    assert places.names == ("input:conv1", "output:act1", "output:bn2", "output:pool")
    named = [(layer.name, places.names[layer.place], layer.norm) for layer in places.layers]
    assert named == [
        ("conv1", "input:conv1", "bn1"),
        ("conv2", "output:act1", "bn2"),
        ("head", "output:pool", None),
    ]


def test_an_integer_network_computes_what_the_rounding_one_does():
    model, x = residual(), torch.randn(64, 2, 5, 5)
    ranges = Ranges(find_places(model, lambda model: model(x)), torch.device("cpu"))
    ranges.observes = lambda: True
    with torch.no_grad():
        plain = model(x)
        detach = attach(model, ranges)
        model(x)
        ranges.follow(ranges.seen, 0.9)
        rounded = model(x)
        detach()
        assert torch.equal(model(x), plain)
        integers = integer_network(model, ranges)(x)
    error, difference = (rounded - plain).norm(), (integers - rounded).norm()
    assert 1e-3 * plain.norm() < error < 0.05 * plain.norm()
    assert difference < 0.3 * error  # biases are integers, too


class ReadsItsLayers(nn.Module):
    def __init__(self):
        super().__init__()
        self.head = nn.Linear(6, 3)

    def forward(self, x):
        return self.head(x) / self.head.in_features


def test_a_network_may_read_what_its_layers_are():
    model, x = ReadsItsLayers(), torch.randn(64, 6)
    ranges = Ranges(find_places(model, lambda model: model(x)), torch.device("cpu"))
    ranges.observes = lambda: True
    with torch.no_grad():
        detach = attach(model, ranges)
        model(x)
        detach()
        ranges.follow(ranges.seen, 0.0)
        torch.testing.assert_close(integer_network(model, ranges)(x), model(x), atol=0.02, rtol=0)


def test_weights_are_rounded_by_channel_and_gradients_pass():
    weight = torch.tensor([[0.5, -1.27, 0.0126], [12.7, 0.0, 0.26]], requires_grad=True)
    rounded = rounded_weight(weight)
    torch.testing.assert_close(
        rounded.detach(), torch.tensor([[0.5, -1.27, 0.01], [12.7, 0.0, 0.3]])
    )
    rounded.square().sum().backward()
    torch.testing.assert_close(weight.grad, 2 * rounded.detach())
    assert torch.equal(rounded_weight(torch.zeros(2, 3)), torch.zeros(2, 3))
