"""Quantized models lose little accuracy, and compute what the run was trained to."""

import pytest
import torch
from torch import nn

from callbacks.compression.qat import Ranges, rounded_weight
from trainer.errors import ModelError
from trainer.export import quantization
from trainer.export.artefact import evaluate_artefact, export_run, samples_of
from trainer.export.formats import Exportable, Network, onnx_model, save_onnx
from trainer.export.quantization import calibration, method_for, quantize_run, write_dynamic
from trainer.inference.run import evaluate_run
from trainer.task import Task

onnx = pytest.importorskip("onnx")
onnxruntime = pytest.importorskip("onnxruntime")


def test_static_integers_lose_at_most_a_point(run, tmp_path):
    path, facts = quantize_run(run, out=tmp_path / "static")
    before, after = facts["before"], facts["after"]
    assert before["test/accuracy"] > 0.9
    assert after["test/accuracy"] >= before["test/accuracy"] - 0.01
    assert after["megabytes"] < 0.5 * before["megabytes"]
    assert facts["quantization"] == {
        "method": "static",
        "weights": "int8",
        "activations": "uint8",
        "calibration_samples": 512,
        "ranges": "of training samples",
    }
    assert facts["provenance"]["run"] == str(run.path)
    assert "| test/accuracy | 0.9" in path.with_name("card.md").read_text()
    graph = onnx.load(str(path)).graph
    kinds = {i.name: i.data_type for i in graph.initializer}
    weights = [n.input[0] for n in graph.node if n.op_type == "DequantizeLinear"]
    assert onnx.TensorProto.INT8 in {kinds.get(name) for name in weights}
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


def test_a_network_trained_for_8_bits_answers_as_it_did_in_training(run, trained, tmp_path):
    qat = trained(tmp_path / "qat", "callbacks=[default,qat]")
    names = [list(r.trainer().model.state_dict()) for r in (run, qat)]
    assert names[0] == names[1]  # plain weights
    path, facts = quantize_run(qat, out=tmp_path / "q")
    assert facts["quantization"]["ranges"] == "learnt in training"
    assert facts["after"]["test/accuracy"] >= facts["before"]["test/accuracy"] - 0.005
    samples, _ = samples_of(qat, list(qat.config.transforms.eval))
    payload = torch.load(qat.path / "checkpoints" / "best.pt", weights_only=True)
    state = payload["callbacks"]["qat"]["fake_quantization"]
    model = qat.model()
    ranges = Ranges(model, "cpu")
    ranges.load_state_dict(state)
    detach = ranges.attach(model)
    with torch.inference_mode():
        expected = model(samples)
    detach()
    session = onnxruntime.InferenceSession(str(path))
    found = torch.from_numpy(session.run(None, {"input": samples.numpy()})[0])
    assert torch.equal(found.argmax(1), expected.argmax(1))
    assert (found - expected).square().mean().sqrt() < 0.02 * expected.abs().max()
    graph = onnx.load(str(path)).graph
    values = {i.name: onnx.numpy_helper.to_array(i) for i in graph.initializer}
    scales = [values[n.input[1]] for n in graph.node if n.op_type == "QuantizeLinear"]
    learnt = ((state["high"] - state["low"]) / 255).tolist()
    assert [min(abs(s / float(t) - 1) for t in scales if t.size == 1) for s in learnt] == (
        pytest.approx([0] * len(learnt), abs=1e-4)
    )


def test_masks_are_tested_but_for_their_loss(trained, tmp_path):
    few = ["trainer.max_steps=2", "trainer.limit_val_batches=1", "model.width=4"]
    run = trained(tmp_path / "run", *few, experiment=["segmentation"])
    _, expected = evaluate_run(run.config, run.path, "best", "test")
    del expected["test/loss"]  # class numbers have none
    path, _ = export_run(run, "onnx", tmp_path / "onnx", "inside")
    _, found = evaluate_artefact(run.config, path)
    assert found == pytest.approx(expected, abs=1e-3)
    _, facts = quantize_run(run, "static", tmp_path / "quantized", "inside", samples=32)
    assert facts["after"]["test/miou"] == pytest.approx(expected["test/miou"], abs=0.05)


def test_without_test_data_those_of_validation_are_taken(trained, tmp_path):
    run = trained(tmp_path / "run", "data.test=null", "trainer.max_steps=1")
    split, found = evaluate_run(run.config, run.path, "best", None)
    assert (split, sorted(found)) == ("val", ["val/accuracy", "val/loss"])
    _, facts = quantize_run(run, out=tmp_path / "q", samples=32, max_drop=1.0)
    assert "val/accuracy" in facts["after"]


@pytest.mark.parametrize(("after", "fits"), [(0.88, False), (0.8901, True)])
def test_a_file_that_loses_too_much_accuracy_is_not_written(
    run, tmp_path, monkeypatch, after, fits
):
    values = iter([("test", {"test/accuracy": 0.9}), ("test", {"test/accuracy": after})])
    monkeypatch.setattr(quantization, "metrics_of", lambda *_: next(values))
    if fits:
        quantize_run(run, out=tmp_path / "q", samples=32)
        return
    with pytest.raises(ModelError, match=r"from 0\.9000 to 0\.8800"):
        quantize_run(run, out=tmp_path / "q", samples=32)
    assert list(tmp_path.iterdir()) == []


def test_dynamic_takes_matrix_products_only(run, tmp_path):
    network = nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten(), nn.Linear(8, 300), nn.Linear(300, 3))
    torch.nn.init.normal_(network[2].weight)
    assert method_for(network) == "dynamic"
    assert method_for(run.model()) == "static"
    x = torch.randn(5, 1, 4, 4)
    proto = onnx_model(Exportable(Network(network, Task()), x, {}))
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
