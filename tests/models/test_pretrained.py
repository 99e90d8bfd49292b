"""Initial weights: where they come from, what fits, and what is refused."""

import logging
import os
from pathlib import Path

import pytest
import torch
from torch import nn

from models.errors import NetworkError, WeightsError
from models.pretrained import fine_tune, load_weights
from models.small_cnn import SmallCNN
from models.weights import no_initial_weights, read_weights
from trainer.checkpoints.archive import write_safetensors


def net(num_classes: int = 10, in_channels: int = 1, seed: int = 0) -> SmallCNN:
    torch.manual_seed(seed)
    return SmallCNN(num_classes, in_channels, widths=(4, 8))


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    path = tmp_path / "weights.pt"
    torch.save(net(seed=1).state_dict(), path)
    return path


def same(a: nn.Module, b: nn.Module, except_for: str = "-") -> bool:
    theirs = b.state_dict()
    return all(
        torch.equal(v, theirs[n]) for n, v in a.state_dict().items() if not n.startswith(except_for)
    )


def test_a_file_a_run_and_a_foreign_wrapper_give_the_same(saved: Path, tmp_path: Path) -> None:
    state = torch.load(saved, weights_only=True)
    (tmp_path / "run/checkpoints").mkdir(parents=True)
    torch.save({"model": state, "format_version": 2}, tmp_path / "run/checkpoints/last.pt")
    torch.save({"state_dict": {f"net.{k}": v for k, v in state.items()}}, tmp_path / "foreign.ckpt")
    expected = net(seed=1)
    assert same(fine_tune(net(), str(saved)), expected)
    assert same(fine_tune(net(), str(tmp_path / "run"), checkpoint="last"), expected)
    assert same(fine_tune(net(), str(tmp_path / "foreign.ckpt"), prefix="net."), expected)


def test_another_number_of_classes_gets_a_fresh_head(
    saved: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    model = fine_tune(net(num_classes=3), str(saved))
    assert same(model, net(seed=1), except_for="head.")
    assert torch.equal(model.head.weight, net(num_classes=3).head.weight)
    assert "resized: head.weight, head.bias" in caplog.text


def test_another_number_of_channels_sees_grey_as_before() -> None:
    trained = net(in_channels=3, seed=1).eval()
    model = net(in_channels=1).eval()
    report = load_weights(model, trained.state_dict())
    grey = torch.randn(2, 1, 8, 8)
    torch.testing.assert_close(model(grey), trained(grey.expand(-1, 3, -1, -1)))
    assert report.adapted == ("features.0.conv.weight",)


def test_dropped_names_stay_as_initialised(saved: Path) -> None:
    model = fine_tune(net(), str(saved), drop=["features.1.*"])
    assert same(model.features[1], net().features[1])
    assert same(model.features[0], net(seed=1).features[0])
    with pytest.raises(NetworkError, match="'featuers"):
        fine_tune(net(), str(saved), drop=["featuers.*"])


def test_names_of_one_side_are_refused_or_reported(
    saved: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = net()
    model.add_module("extra", nn.BatchNorm1d(2))
    model.add_module("head", nn.Linear(8, 10, bias=False))
    with pytest.raises(
        WeightsError, match=r"missing: extra.weight.*\+1 more.*unexpected: head.bias"
    ):
        fine_tune(model, str(saved))
    fine_tune(model, str(saved), strict=False, head="head")
    assert "unexpected: head.bias" in caplog.text


def test_a_shape_that_differs_elsewhere_is_named() -> None:
    trained = SmallCNN(10, 1, widths=(4, 9)).state_dict()
    with pytest.raises(WeightsError, match=r"features.1.conv.weight has shape \(9, 4, 3, 3\)"):
        load_weights(net(), trained)


def test_foreign_names_are_shown_beside_ours() -> None:
    with pytest.raises(WeightsError, match=r"a\.weight against features.0.conv.weight.*prefix"):
        load_weights(net(), {"a.weight": torch.zeros(1)})


def test_a_resumed_run_needs_no_file() -> None:
    with no_initial_weights():
        model = fine_tune(net(), "gone.pt")
    assert same(model, net())


class Payload:
    """A pickle that would touch a file."""

    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self) -> tuple[object, ...]:
        return os.system, (f"touch {self.target}",)


@pytest.mark.parametrize("zipped", [True, False], ids=["zip", "pickle"])
def test_code_in_a_file_is_refused_unrun(
    tmp_path: Path, zipped: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")
    path, canary = tmp_path / "bad.pt", tmp_path / "canary"
    torch.save({"model": Payload(canary)}, path, _use_new_zipfile_serialization=zipped)
    with pytest.raises(WeightsError, match="contains code") as caught:
        read_weights(str(path))
    assert "weights_only" not in str(caught.value)
    assert not canary.exists()


def test_a_damaged_file_is_named(saved: Path) -> None:
    whole = saved.read_bytes()
    at = whole.index(next(iter(net(seed=1).state_dict().values())).numpy().tobytes()) + 5
    damaged = [
        whole[: len(whole) // 2],
        b"",
        b"<html>",
        whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :],
    ]
    for content in damaged:
        saved.write_bytes(content)
        with pytest.raises(WeightsError, match=r"weights\.pt") as caught:
            read_weights(str(saved))
        assert "weights_only" not in str(caught.value)


@pytest.mark.parametrize(
    ("source", "words", "code"),
    [
        pytest.param("nowhere.pt", "no file nowhere.pt", 2, id="file"),
        pytest.param("torchvision:ResNet81.DEFAULT", "torchvision:ResNet18_Weights", 2, id="entry"),
        pytest.param("torchvision:ResNet18", "torchvision:ResNet18_Weights", 2, id="form"),
    ],
)
def test_a_source_that_is_none(source: str, words: str, code: int) -> None:
    with pytest.raises(NetworkError, match=words) as caught:
        read_weights(source)
    assert caught.value.exit_code == code


def test_a_safetensors_file_is_read(saved: Path, tmp_path: Path) -> None:
    write_safetensors(tmp_path / "w.safetensors", torch.load(saved, weights_only=True))
    assert same(fine_tune(net(), str(tmp_path / "w.safetensors")), net(seed=1))
    (tmp_path / "w.safetensors").write_bytes(b"<html>")
    with pytest.raises(WeightsError, match=r"w\.safetensors: damaged"):
        read_weights(str(tmp_path / "w.safetensors"))


def test_a_file_without_weights_is_refused(tmp_path: Path) -> None:
    torch.save({"step": 3}, tmp_path / "x.pt")
    with pytest.raises(WeightsError, match="not a state dict"):
        read_weights(str(tmp_path / "x.pt"))


@pytest.mark.parametrize(
    ("callbacks", "ema"),
    [
        pytest.param({}, True, id="ema"),
        pytest.param({"swa": 2}, False, id="swa"),
    ],
)
def test_the_average_of_a_run_goes_before_its_weights(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, callbacks: dict[str, int], ema: bool
) -> None:
    caplog.set_level(logging.INFO)
    average = net(seed=2).state_dict()
    kept = {name: {"model": average, "averaged": count} for name, count in callbacks.items()}
    payload = {"model": net(seed=1).state_dict(), "format_version": 2, "callbacks": kept}
    torch.save(payload | {"ema": {"model": average} if ema else {}}, tmp_path / "run.pt")
    assert same(fine_tune(net(), str(tmp_path / "run.pt")), net(seed=2))
    assert "the average of the weights" in caplog.text
    assert same(fine_tune(net(), str(tmp_path / "run.pt"), average=False), net(seed=1))


def test_an_average_of_nothing_is_none(tmp_path: Path) -> None:
    kept = {"swa": {"model": net(seed=2).state_dict(), "averaged": 0}}
    payload = {"model": net(seed=1).state_dict(), "format_version": 2, "ema": {}, "callbacks": kept}
    torch.save(payload, tmp_path / "run.pt")
    assert same(fine_tune(net(), str(tmp_path / "run.pt")), net(seed=1))
