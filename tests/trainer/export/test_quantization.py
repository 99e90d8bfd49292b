"""Quantized models lose little accuracy, and files are tested by the metrics of their run."""

import json

import pytest
import torch
from torch import nn

from scripts.export import FORMATS as COMMAND_FORMATS
from trainer.errors import ModelError
from trainer.export import quantization
from trainer.export.artefact import export_run, samples_of
from trainer.export.evaluation import evaluate_artefact
from trainer.export.fake_quantization import LEARNT, Ranges, attach, rounded_weight
from trainer.export.formats import FORMATS, Network, onnx_model, save_onnx
from trainer.export.quantization import check_drop, method_for, quantize_run, write_dynamic
from trainer.inference.run import evaluate_run
from trainer.task import Task

onnx = pytest.importorskip("onnx")
onnxruntime = pytest.importorskip("onnxruntime")


@pytest.fixture(scope="module")
def static(run, tmp_path_factory):
    return quantize_run(run, out=tmp_path_factory.mktemp("made") / "static")


def test_static_integers_lose_at_most_a_point(run, static):
    assert static.method == "static"
    assert not static.learnt
    assert static.before["test/accuracy"] > 0.9
    assert static.after["test/accuracy"] >= static.before["test/accuracy"] - 0.01
    assert static.after["megabytes"] < 0.5 * static.before["megabytes"]
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
    found = evaluate_artefact(run.config, static.file)
    assert found == ("test", {k: v for k, v in static.after.items() if k.startswith("test/")})


def test_calibration_sees_the_first_samples_of_the_seed(run):
    names = list(run.config.transforms.eval)
    batches = [list(quantization._training_batches(run.config, names, n)) for n in (64, 10_000)]
    assert [len(batch) for batch in batches[0]] == [32, 32]
    assert all(torch.equal(a, b) for a, b in zip(*batches, strict=False))
    everything = torch.cat(batches[1])
    assert len(everything) == 1257
    assert everything.min() == pytest.approx((0 - 0.305) / 0.319)


def test_a_network_trained_for_8_bits_answers_as_it_did_in_training(run, trained, tmp_path):
    qat = trained(tmp_path / "qat", "callbacks=[default,qat]")
    names = [list(r.trainer().model.state_dict()) for r in (run, qat)]
    assert names[0] == names[1]  # plain weights
    made = quantize_run(qat, out=tmp_path / "q")
    assert made.learnt
    assert made.after["test/accuracy"] >= made.before["test/accuracy"] - 0.005
    samples, _ = samples_of(qat, list(qat.config.transforms.eval))
    payload = torch.load(qat.path / "checkpoints" / "best.pt", weights_only=True)
    state = payload["callbacks"]["qat"][LEARNT]
    model = qat.model()
    ranges = Ranges(model, "cpu")
    ranges.load_state_dict(state)
    detach = attach(model, ranges)
    with torch.inference_mode():
        expected = model(samples)
    detach()
    session = onnxruntime.InferenceSession(str(made.file))
    found = torch.from_numpy(session.run(None, {"input": samples.numpy()})[0])
    assert torch.equal(found.argmax(1), expected.argmax(1))
    assert (found - expected).square().mean().sqrt() < 0.02 * expected.abs().max()
    graph = onnx.load(str(made.file)).graph
    values = {i.name: onnx.numpy_helper.to_array(i) for i in graph.initializer}
    scales = [values[n.input[1]] for n in graph.node if n.op_type == "QuantizeLinear"]
    learnt = ((state["high"] - state["low"]) / 255).tolist()
    assert [min(abs(s / float(t) - 1) for t in scales if t.size == 1) for s in learnt] == (
        pytest.approx([0] * len(learnt), abs=1e-4)
    )


@pytest.mark.parametrize("preprocessing", ["outside", "inside"])
def test_every_format_is_tested_by_the_metrics_of_the_run(run, tmp_path, preprocessing):
    split, expected = evaluate_run(run.config, run.path, "best", None)
    assert split == "test"
    assert set(COMMAND_FORMATS) == set(FORMATS)
    quick = [name for name in COMMAND_FORMATS if name != "aoti"]  # compiling takes a minute
    for name in ["onnx"] if preprocessing == "inside" else quick:
        made = export_run(run, name, tmp_path / name, preprocessing)
        _, found = evaluate_artefact(run.config, made.file, "test", allow_code=True)
        assert found["test/accuracy"] == expected["test/accuracy"]
        assert found["test/loss"] == pytest.approx(expected["test/loss"], abs=1e-4)


def test_masks_are_tested_but_for_their_loss(trained, tmp_path):
    few = ["trainer.max_steps=2", "trainer.limit_val_batches=1", "model.width=4"]
    run = trained(tmp_path / "run", *few, experiment=["segmentation"])
    _, expected = evaluate_run(run.config, run.path, "best", "test")
    del expected["test/loss"]  # class numbers have none
    made = export_run(run, "onnx", tmp_path / "onnx", "inside")
    _, found = evaluate_artefact(run.config, made.file)
    assert found == pytest.approx(expected, abs=1e-3)
    quantized = quantize_run(run, "static", tmp_path / "quantized", "inside", samples=32)
    assert quantized.after["test/miou"] == pytest.approx(expected["test/miou"], abs=0.05)


def test_without_test_data_those_of_validation_are_taken(trained, tmp_path):
    run = trained(tmp_path / "run", "data.test=null", "trainer.max_steps=1")
    split, found = evaluate_run(run.config, run.path, "best", None)
    assert (split, sorted(found)) == ("val", ["val/accuracy", "val/loss"])
    made = quantize_run(run, out=tmp_path / "q", samples=32, max_drop=1.0)
    assert "val/accuracy" in made.after


def test_files_that_run_code_or_were_changed_are_not_loaded(run, tmp_path):
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
    check_drop({"test/accuracy": 0.9}, {"test/accuracy": 0.8901}, 0.01)


def test_dynamic_takes_matrix_products_only(run, tmp_path):
    network = nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten(), nn.Linear(8, 300), nn.Linear(300, 3))
    torch.nn.init.normal_(network[2].weight)
    assert method_for(network) == "dynamic"
    assert method_for(run.model()) == "static"
    x = torch.randn(5, 1, 4, 4)
    proto = onnx_model(Network(network, Task(), nn.Sequential(), False).eval(), x[:2].clone())
    save_onnx(proto, tmp_path / "float.onnx", {"classes": ["a"]})
    write_dynamic(tmp_path / "float.onnx", tmp_path / "int.onnx")
    kinds = [node.op_type for node in onnx.load(str(tmp_path / "int.onnx")).graph.node]
    assert kinds.count("MatMulInteger") == 2
    assert kinds.count("Conv") == 1
    session = onnxruntime.InferenceSession(str(tmp_path / "int.onnx"))
    assert session.get_modelmeta().custom_metadata_map["classes"] == '["a"]'
    with torch.no_grad():
        expected = network(x)
    (found,) = session.run(None, {"input": x.numpy()})
    assert (torch.from_numpy(found) - expected).abs().max() < 0.05 * expected.abs().max()


def test_weights_are_rounded_by_channel_and_gradients_pass():
    weight = torch.tensor([[0.5, -1.27, 0.0126], [12.7, 0.0, 0.26]], requires_grad=True)
    rounded = rounded_weight(weight)
    torch.testing.assert_close(
        rounded.detach(), torch.tensor([[0.5, -1.27, 0.01], [12.7, 0.0, 0.3]])
    )
    rounded.square().sum().backward()
    torch.testing.assert_close(weight.grad, 2 * rounded.detach())
    assert torch.equal(rounded_weight(torch.zeros(2, 3)), torch.zeros(2, 3))
