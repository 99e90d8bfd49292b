"""Initial weights and others' models: where they come from, what fits, and what is refused."""

import logging
import sys
from types import SimpleNamespace

import pytest
import torch
import torchvision
from torch import nn
from torch.hub import get_dir

from regimen.data.errors import MissingPackageError
from regimen.models import torchvision_adapter
from regimen.models.layers import NetworkError
from regimen.models.pretrained import fine_tune, load_weights, no_initial_weights
from regimen.models.pretrained import read_weights as read
from regimen.models.small_cnn import SmallCNN
from regimen.models.timm_adapter import build as from_timm
from regimen.models.torchvision_adapter import build as from_torchvision
from regimen.models.transformers_adapter import build as from_transformers
from regimen.trainer.checkpoints.archive import write_safetensors
from regimen.trainer.checkpoints.borrowed import sources_of
from regimen.trainer.errors import CheckpointError


def net(num_classes=10, in_channels=1, seed=0):
    torch.manual_seed(seed)
    return SmallCNN(num_classes, in_channels, widths=(4, 8))


@pytest.fixture
def saved(tmp_path):
    path = tmp_path / "weights.pt"
    torch.save(net(seed=1).state_dict(), path)
    return path


def same(a, b, except_for="-"):
    theirs = b.state_dict()
    return all(
        torch.equal(v, theirs[n]) for n, v in a.state_dict().items() if not n.startswith(except_for)
    )


def test_a_file_a_run_and_a_foreign_wrapper_give_the_same(saved, tmp_path):
    state = torch.load(saved, weights_only=True)
    expected = net(seed=1)
    (tmp_path / "run/checkpoints").mkdir(parents=True)
    torch.save({"model": state, "format_version": 2}, tmp_path / "run/checkpoints/last.pt")
    torch.save({"state_dict": {f"net.{k}": v for k, v in state.items()}}, tmp_path / "foreign.ckpt")
    write_safetensors(tmp_path / "w.safetensors", state)
    assert same(fine_tune(net(), str(saved)), expected)
    assert same(fine_tune(net(), str(tmp_path / "run"), checkpoint="last"), expected)
    assert same(fine_tune(net(), str(tmp_path / "foreign.ckpt"), prefix="net."), expected)
    assert same(fine_tune(net(), str(tmp_path / "w.safetensors")), expected)
    with pytest.raises(CheckpointError, match="no name with the prefix 'x'"):
        fine_tune(net(), str(saved), prefix="x")
    torch.save({"step": 3}, saved)
    with pytest.raises(CheckpointError, match="contains no weights"):
        read(str(saved))
    torch.save(net(), saved)  # a pickled module: read as checkpoints are, which run no code
    with pytest.raises(CheckpointError, match="contains code"):
        read(str(saved))
    saved.write_bytes(b"<html>")
    with pytest.raises(CheckpointError, match=r"weights\.pt"):
        read(str(saved))


def test_another_number_of_classes_gets_a_fresh_head(saved, caplog):
    caplog.set_level(logging.INFO)
    model = fine_tune(net(num_classes=3), str(saved))
    assert same(model, net(seed=1), except_for="head.")
    assert torch.equal(model.head.weight, net(num_classes=3).head.weight)
    assert "resized: head.weight, head.bias" in caplog.text


@pytest.mark.parametrize("channels", [1, 2])
def test_another_number_of_channels_sees_grey_as_before(channels):
    trained = net(in_channels=3, seed=1).eval()
    model = net(in_channels=channels).eval()
    found = load_weights(model, trained.state_dict())
    grey = torch.randn(2, 1, 8, 8)
    seen = model(grey.expand(-1, channels, -1, -1))
    torch.testing.assert_close(seen, trained(grey.expand(-1, 3, -1, -1)))
    assert found["adapted"] == ["features.0.conv.weight"]


def test_dropped_names_stay_as_initialised(saved):
    model = fine_tune(net(), str(saved), drop=["features.1.*"])
    assert same(model.features[1], net().features[1])
    assert same(model.features[0], net(seed=1).features[0])
    with pytest.raises(NetworkError, match="'featuers"):
        fine_tune(net(), str(saved), drop=["featuers.*"])


def test_missing_and_unexpected_names_are_errors_if_strict_else_logged(saved, caplog):
    model = net()
    model.add_module("extra", nn.BatchNorm1d(2))
    model.add_module("head", nn.Linear(8, 10, bias=False))
    words = r"missing: extra.weight, .*running_var; unexpected: head.bias"
    with pytest.raises(CheckpointError, match=words):
        fine_tune(model, str(saved))
    fine_tune(model, str(saved), strict=False, head="head")
    assert "unexpected: head.bias" in caplog.text


def test_weights_that_do_not_fit_raise_errors_that_name_them():
    words = r"features.1.conv.weight: .*\[9, 4, 3, 3\].*\[8, 4, 3, 3\].* model.drop$"
    with pytest.raises(CheckpointError, match=words):
        load_weights(net(), SmallCNN(10, 1, widths=(4, 9)).state_dict())
    with pytest.raises(CheckpointError, match=r"a\.weight against features.0.conv.*prefix"):
        load_weights(net(), {"a.weight": torch.zeros(1)})


@pytest.mark.parametrize("callbacks", [{}, {"swa": 2}, {"swa": 0}], ids=str)
def test_the_average_of_a_run_is_preferred_to_its_weights(tmp_path, caplog, callbacks):
    caplog.set_level(logging.INFO)
    average = net(seed=2).state_dict()
    kept = {name: {"model": average, "averaged": count} for name, count in callbacks.items()}
    payload = {"model": net(seed=1).state_dict(), "format_version": 2, "callbacks": kept}
    torch.save(payload | {"ema": {} if kept else {"model": average}}, tmp_path / "run.pt")
    begun = 0 not in callbacks.values()  # an average of nothing is none
    assert same(fine_tune(net(), str(tmp_path / "run.pt")), net(seed=2 if begun else 1))
    assert ("the average of the weights" in caplog.text) == begun
    assert same(fine_tune(net(), str(tmp_path / "run.pt"), average=False), net(seed=1))


@pytest.fixture
def cached(monkeypatch):
    """A trained ResNet-18 in place of what torchvision would download."""
    torch.manual_seed(1)
    trained = torchvision.models.resnet18()
    entry = torchvision.models.ResNet18_Weights
    monkeypatch.setattr(entry, "get_state_dict", lambda self, **_: trained.state_dict())
    return trained


@pytest.mark.parametrize("name", ["resnet18", "squeezenet1_0", "shufflenet_v2_x0_5", "mnasnet0_5"])
def test_a_model_without_weights_equals_torchvisions(name):
    torch.manual_seed(0)
    model = from_torchvision(name, num_classes=5).eval()
    torch.manual_seed(0)
    reference = torchvision.models.get_model(name, num_classes=5).eval()
    x = torch.randn(1, 3, 64, 64)
    torch.testing.assert_close(model(x), reference(x), rtol=0, atol=0)


def test_arguments_reach_the_builder_and_channels_follow_the_data():
    model = from_torchvision("mobilenet_v3_small", 5, in_channels=1, dropout=0.7).eval()
    assert {m.p for m in model.modules() if isinstance(m, nn.Dropout)} == {0.7}
    assert model(torch.zeros(2, 1, 32, 32)).shape == (2, 5)
    grey, colour = (from_torchvision("resnet18", 5, in_channels=n).conv1.weight for n in (1, 3))
    assert grey.std().item() == pytest.approx(colour.std().item(), rel=0.1)


def test_trained_weights_with_a_fresh_head_and_for_grey_images(cached):
    model = from_torchvision("resnet18", num_classes=5, weights="DEFAULT")
    assert model.fc.weight.shape == (5, 512)
    assert same(model, cached, except_for="fc.")
    assert same(fine_tune(model, "torchvision:ResNet18_Weights.DEFAULT"), cached, except_for="fc.")
    model = from_torchvision("resnet18", 1000, in_channels=1, weights="DEFAULT").eval()
    grey = torch.randn(2, 1, 32, 32)
    torch.testing.assert_close(model(grey), cached.eval()(grey.expand(-1, 3, -1, -1)))


def test_weights_are_not_fetched_on_meta_nor_for_a_checkpoints_sake(monkeypatch):
    monkeypatch.setattr(torchvision_adapter, "fetch", lambda entry: pytest.fail("fetched"))
    with torch.device("meta"):
        from_torchvision("resnet18", 5, in_channels=1, weights="DEFAULT")
    with no_initial_weights():
        from_torchvision("inception_v3", 5, weights="DEFAULT")
        assert same(fine_tune(net(), "gone.pt"), net())


def test_frozen_norms_compute_the_same_in_training_and_keep_their_names(saved):
    expected = net(seed=1)
    for norm in expected.modules():
        if isinstance(norm, nn.BatchNorm2d):
            norm.running_mean.normal_()
            norm.running_var.uniform_(0.5, 2)
            norm.weight.data.uniform_(0.5, 2)
    torch.save(expected.state_dict(), saved)
    model = fine_tune(net(), str(saved), freeze_batch_norm=True).train()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    assert before.keys() == expected.state_dict().keys()
    images = torch.randn(3, 1, 16, 16)
    torch.testing.assert_close(model(images), expected.eval()(images))
    model(images).square().mean().backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    moved = {n for n, v in model.state_dict().items() if not torch.equal(v, before[n])}
    frozen = {n for n in before if ".bn" in n}
    assert moved == before.keys() - frozen
    assert len(frozen) == 10

    # What it has trained is loaded into a network with BatchNorm, and the reverse.
    torch.save(model.state_dict(), saved)
    assert same(fine_tune(net(), str(saved)), model)
    with no_initial_weights():  # as before a checkpoint is loaded
        again = fine_tune(net(), "gone.pt", freeze_batch_norm=True)
    again.load_state_dict(model.state_dict())
    torch.testing.assert_close(again.train()(images), model(images))


def test_auxiliary_outputs_are_returned_in_training_alone(monkeypatch):
    model = from_torchvision("fcn_resnet50", num_classes=4, aux_loss=True)
    images = torch.zeros(2, 3, 32, 32)
    assert {n: v.shape[1] for n, v in model(images).items()} == {"out": 4, "aux": 4}
    assert model.eval()(images).shape == (2, 4, 32, 32)
    # Trained weights include the auxiliary output, which may not be built.
    state = from_torchvision("fcn_resnet50", num_classes=21, aux_loss=True).state_dict()
    monkeypatch.setattr(torchvision_adapter, "fetch", lambda entry: state)
    plain = from_torchvision("fcn_resnet50", num_classes=4, weights="DEFAULT")
    assert plain.train()(images).shape == (2, 4, 32, 32)
    both = from_torchvision("fcn_resnet50", num_classes=4, weights="DEFAULT", aux_loss=True)
    assert both(images)["aux"].shape == (2, 4, 32, 32)


def test_a_failed_download_names_the_folder_for_the_file(monkeypatch):
    def refuse(*args, **kwargs):
        raise OSError("network is unreachable")

    monkeypatch.setattr(torchvision.models.ResNet18_Weights, "get_state_dict", refuse)
    for ask in (
        lambda: from_torchvision("resnet18", 5, weights="DEFAULT"),
        lambda: read("torchvision:ResNet18_Weights.DEFAULT"),
    ):
        with pytest.raises(CheckpointError, match=f"unreachable.*{get_dir()}.*a file") as caught:
            ask()
        assert caught.value.exit_code == 2  # what the configuration names


def test_segmentation_models_return_their_main_output_and_download_nothing():
    model = from_torchvision("lraspp_mobilenet_v3_large", num_classes=4).eval()
    assert model(torch.zeros(1, 3, 32, 32)).shape == (1, 4, 32, 32)


WRONG_NAMES = {
    "no file nowhere.pt": lambda: read("nowhere.pt"),
    r"'ResNet81\.DEFAULT'.*torchvision:ResNet18_W": lambda: read("torchvision:ResNet81.DEFAULT"),
    "'ResNet18'.*torchvision:ResNet18_W": lambda: read("torchvision:ResNet18"),
    "nearest: resnet18": lambda: from_torchvision("resnet81", 5),
    "IMAGENET1K_V1": lambda: from_torchvision("resnet18", 5, weights="BEST"),
    "cannot be resized": lambda: from_torchvision("ssd300_vgg16", 5, weights="DEFAULT"),
}


@pytest.mark.parametrize("message", WRONG_NAMES)
def test_a_wrong_name_lists_similar_ones(message):
    with pytest.raises(NetworkError, match=message) as caught:
        WRONG_NAMES[message]()
    assert caught.value.exit_code == 2


def test_timm_is_called_with_its_own_argument_names(monkeypatch):
    given = {}

    def create_model(name, **arguments):
        given.update(arguments, name=name)
        return nn.Linear(1, 1)

    fake = SimpleNamespace(create_model=create_model, list_models=lambda *_: ["vit_small"])
    monkeypatch.setitem(sys.modules, "timm", fake)
    from_timm("vit_small", 7, in_channels=1, pretrained=True, img_size=16)
    assert given == {
        "name": "vit_small", "num_classes": 7, "in_chans": 1, "pretrained": True, "img_size": 16
    }  # fmt: skip
    with pytest.raises(NetworkError, match="vit_smell"):
        from_timm("vit_smell", 7)
    monkeypatch.setitem(sys.modules, "timm", None)
    with pytest.raises(MissingPackageError, match=r"regimen\[timm\]"):
        from_timm("resnet18", 7)


TINY = {
    "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16,
    "vocab_size": 50,
}  # fmt: skip


@pytest.fixture
def _transformers():
    pytest.importorskip("transformers", reason="the extra transformers is not installed")


@pytest.mark.usefixtures("_transformers")
def test_logits_and_loss_equal_those_of_transformers():
    model = from_transformers("bert", 3, config=TINY).eval()
    tokens = torch.arange(10).view(2, 5)
    mask = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 0, 0, 0]])
    found = model({"input_ids": tokens, "attention_mask": mask})
    assert torch.equal(found, model.model(input_ids=tokens, attention_mask=mask).logits)
    assert found.shape == model(tokens).shape == (2, 3)
    tiny = {"n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 8}
    model = from_transformers("gpt2", 50, auto="AutoModelForCausalLM", config=tiny)
    assert model(torch.zeros(2, 8, dtype=torch.long)).shape == (2, 8, 50)  # the vocabulary


@pytest.mark.usefixtures("_transformers")
@pytest.mark.parametrize(
    ("auto", "size"),
    [
        ("AutoModelForCausalLM", "vocab_size"),
        ("AutoModelForSequenceClassification", "num_labels"),
    ],
)
def test_classes_that_nothing_counts_are_as_many_as_the_configuration_says(auto, size):
    tiny = {"n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 8, size: 7}
    model = from_transformers("gpt2", None, auto=auto, config=tiny)
    assert getattr(model.model.config, size) == 7


@pytest.mark.usefixtures("_transformers")
def test_a_folder_is_loaded_with_a_new_head(tmp_path):
    model = from_transformers("bert", 3, config=TINY)
    model.model.save_pretrained(tmp_path)
    assert same(from_transformers(str(tmp_path), 3), model)
    other = from_transformers(str(tmp_path), 5)
    assert same(other, model, except_for="model.classifier")
    assert other(torch.zeros(2, 4, dtype=torch.long)).shape == (2, 5)


@pytest.mark.usefixtures("_transformers")
def test_invalid_arguments_raise_errors_that_name_the_key(tmp_path):
    with pytest.raises(NetworkError, match=r"model\.auto: transformers has no 'AutoModel'"):
        from_transformers("bert", 3, auto="AutoModel", config=TINY)
    for name, given in (("bertt", {"config": TINY}), (str(tmp_path / "absent" / "folder"), {})):
        with pytest.raises(NetworkError, match=r"model\.name="):
            from_transformers(name, 3, **given)


def test_what_torchvision_weights_were_read_into_is_known(monkeypatch, tmp_path):
    state = torchvision.models.resnet18().state_dict()
    path = tmp_path / "resnet18.pth"
    torch.save(state, path)
    adapter = "regimen.models.torchvision_adapter"
    monkeypatch.setattr(f"{adapter}.fetch", lambda entry: state)
    monkeypatch.setattr(f"{adapter}.cached_file", lambda entry: path)
    for classes, head in ((1000, {"fc.weight", "fc.bias"}), (3, set())):
        model = from_torchvision("resnet18", classes, weights="DEFAULT")
        ((source, names),) = sources_of({"": model}).items()
        assert [*source.files] == [path]
        others = {name for name, _ in model.named_parameters() if not name.startswith("fc.")}
        assert names == others | head
