"""Initial weights and others' models: where they come from, what fits, and what is refused."""

import logging
import sys
from types import SimpleNamespace

import pytest
import torch
import torchvision
from torch import nn
from torch.hub import get_dir

from regimen.conf.errors import ConfigError
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


def assert_same(model, expected, except_for="-"):
    """Compare all weights and statistics but those whose name starts with `except_for`."""
    theirs = expected.state_dict()
    for name, value in model.state_dict().items():
        if not name.startswith(except_for):
            assert torch.equal(value, theirs[name]), name


def test_a_file_gives_its_weights(saved):
    assert_same(fine_tune(net(), str(saved)), net(seed=1))


def test_a_run_gives_its_weights(saved, tmp_path):
    state = torch.load(saved, weights_only=True)
    checkpoints = tmp_path / "run/checkpoints"
    checkpoints.mkdir(parents=True)
    torch.save({"model": state, "format_version": 2}, checkpoints / "last.pt")

    model = fine_tune(net(), str(tmp_path / "run"), checkpoint="last")

    assert_same(model, net(seed=1))


def test_a_foreign_wrapper_gives_its_weights(saved, tmp_path):
    state = torch.load(saved, weights_only=True)
    prefixed = {f"net.{name}": value for name, value in state.items()}
    torch.save({"state_dict": prefixed}, tmp_path / "foreign.ckpt")

    model = fine_tune(net(), str(tmp_path / "foreign.ckpt"), prefix="net.")

    assert_same(model, net(seed=1))


def test_a_file_of_safetensors_gives_its_weights(saved, tmp_path):
    state = torch.load(saved, weights_only=True)
    write_safetensors(tmp_path / "w.safetensors", state)

    model = fine_tune(net(), str(tmp_path / "w.safetensors"))

    assert_same(model, net(seed=1))


def test_a_file_without_weights_is_refused_by_its_name(saved):
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

    assert_same(model, net(seed=1), except_for="head.")
    fresh = net(num_classes=3)
    assert torch.equal(model.head.weight, fresh.head.weight)
    assert "resized: head.weight, head.bias" in caplog.text


@pytest.mark.parametrize("channels", [1, 2])
def test_another_number_of_channels_sees_grey_as_before(channels):
    trained = net(in_channels=3, seed=1).eval()
    model = net(in_channels=channels).eval()
    grey = torch.randn(2, 1, 8, 8)
    expected = trained(grey.expand(-1, 3, -1, -1))

    report = load_weights(model, trained.state_dict())

    seen = model(grey.expand(-1, channels, -1, -1))
    torch.testing.assert_close(seen, expected)
    assert report["adapted"] == ["features.0.conv.weight"]


def test_dropped_names_stay_as_initialised(saved):
    model = fine_tune(net(), str(saved), drop=["features.1.*"])

    assert_same(model.features[1], net().features[1])
    assert_same(model.features[0], net(seed=1).features[0])
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


def save_run(path, callbacks, ema):
    """Write a run's checkpoint whose weights are those of seed 1."""
    weights = net(seed=1).state_dict()
    torch.save({"model": weights, "format_version": 2, "callbacks": callbacks, "ema": ema}, path)
    return str(path)


AVERAGE = net(seed=2).state_dict()


@pytest.mark.parametrize(
    ("callbacks", "ema"),
    [
        pytest.param({}, {"model": AVERAGE}, id="ema"),
        pytest.param({"swa": {"model": AVERAGE, "averaged": 2}}, {}, id="swa"),
    ],
)
def test_the_average_of_a_run_is_preferred_to_its_weights(tmp_path, caplog, callbacks, ema):
    caplog.set_level(logging.INFO)
    run = save_run(tmp_path / "run.pt", callbacks, ema)

    model = fine_tune(net(), run)

    assert_same(model, net(seed=2))
    assert "the average of the weights" in caplog.text
    assert_same(fine_tune(net(), run, average=False), net(seed=1))


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


def test_an_average_of_nothing_is_none(tmp_path, caplog):
    caplog.set_level(logging.INFO)
    run = save_run(tmp_path / "run.pt", {"swa": {"model": AVERAGE, "averaged": 0}}, {})

    model = fine_tune(net(), run)

    assert_same(model, net(seed=1))
    assert "the average of the weights" not in caplog.text
    assert_same(fine_tune(net(), run, average=False), net(seed=1))


def test_arguments_reach_the_builder_and_channels_follow_the_data():
    model = from_torchvision("mobilenet_v3_small", 5, in_channels=1, dropout=0.7).eval()

    dropouts = [module for module in model.modules() if isinstance(module, nn.Dropout)]
    assert {dropout.p for dropout in dropouts} == {0.7}
    assert model(torch.zeros(2, 1, 32, 32)).shape == (2, 5)


def test_the_first_layer_of_grey_images_is_initialised_as_that_of_colour():
    grey = from_torchvision("resnet18", 5, in_channels=1).conv1.weight
    colour = from_torchvision("resnet18", 5, in_channels=3).conv1.weight

    assert grey.std().item() == pytest.approx(colour.std().item(), rel=0.1)


def test_trained_weights_with_a_fresh_head(cached):
    model = from_torchvision("resnet18", num_classes=5, weights="DEFAULT")

    assert model.fc.weight.shape == (5, 512)
    assert_same(model, cached, except_for="fc.")
    again = fine_tune(model, "torchvision:ResNet18_Weights.DEFAULT")
    assert_same(again, cached, except_for="fc.")


def test_trained_weights_for_grey_images(cached):
    cached.eval()
    grey = torch.randn(2, 1, 32, 32)
    expected = cached(grey.expand(-1, 3, -1, -1))

    model = from_torchvision("resnet18", 1000, in_channels=1, weights="DEFAULT").eval()

    torch.testing.assert_close(model(grey), expected)


def test_weights_are_not_fetched_on_meta_nor_for_a_checkpoints_sake(monkeypatch):
    monkeypatch.setattr(torchvision_adapter, "fetch", lambda entry: pytest.fail("fetched"))

    with torch.device("meta"):
        from_torchvision("resnet18", 5, in_channels=1, weights="DEFAULT")
    with no_initial_weights():
        from_torchvision("inception_v3", 5, weights="DEFAULT")
        model = fine_tune(net(), "gone.pt")

    assert_same(model, net())


def trained_statistics():
    """Return a network whose BatchNorm has statistics and weights other than the initial ones."""
    model = net(seed=1)
    for norm in model.modules():
        if isinstance(norm, nn.BatchNorm2d):
            norm.running_mean.normal_()
            norm.running_var.uniform_(0.5, 2)
            norm.weight.data.uniform_(0.5, 2)
    return model.eval()


def test_frozen_norms_compute_the_same_in_training_and_keep_their_names(saved):
    expected = trained_statistics()
    torch.save(expected.state_dict(), saved)
    images = torch.randn(3, 1, 16, 16)

    model = fine_tune(net(), str(saved), freeze_batch_norm=True).train()

    assert model.state_dict().keys() == expected.state_dict().keys()
    torch.testing.assert_close(model(images), expected(images))


def test_frozen_norms_are_all_that_a_step_does_not_change(saved):
    torch.save(trained_statistics().state_dict(), saved)
    model = fine_tune(net(), str(saved), freeze_batch_norm=True).train()
    before = {name: value.clone() for name, value in model.state_dict().items()}

    model(torch.randn(3, 1, 16, 16)).square().mean().backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()

    after = model.state_dict()
    unchanged = {name for name in before if torch.equal(after[name], before[name])}
    frozen = {name for name in before if ".bn" in name}
    assert unchanged == frozen
    assert len(frozen) == 10


def test_frozen_norms_are_loaded_into_batch_norm_and_the_reverse(saved):
    torch.save(trained_statistics().state_dict(), saved)
    model = fine_tune(net(), str(saved), freeze_batch_norm=True).train()
    torch.save(model.state_dict(), saved)

    assert_same(fine_tune(net(), str(saved)), model)

    with no_initial_weights():  # as before a checkpoint is loaded
        again = fine_tune(net(), "gone.pt", freeze_batch_norm=True)
    again.load_state_dict(model.state_dict())
    images = torch.randn(3, 1, 16, 16)
    torch.testing.assert_close(again.train()(images), model(images))


def test_auxiliary_outputs_are_returned_in_training_alone():
    model = from_torchvision("fcn_resnet50", num_classes=4, aux_loss=True)
    images = torch.zeros(2, 3, 32, 32)

    in_training = model(images)
    in_evaluation = model.eval()(images)

    assert in_training.keys() == {"out", "aux"}
    assert in_training["out"].shape[1] == 4
    assert in_training["aux"].shape[1] == 4
    assert in_evaluation.shape == (2, 4, 32, 32)


def test_trained_weights_have_an_auxiliary_output_which_may_not_be_built(monkeypatch):
    trained = from_torchvision("fcn_resnet50", num_classes=21, aux_loss=True)
    monkeypatch.setattr(torchvision_adapter, "fetch", lambda entry: trained.state_dict())
    images = torch.zeros(2, 3, 32, 32)

    without = from_torchvision("fcn_resnet50", num_classes=4, weights="DEFAULT")
    both = from_torchvision("fcn_resnet50", num_classes=4, weights="DEFAULT", aux_loss=True)

    assert without.train()(images).shape == (2, 4, 32, 32)
    assert both(images)["aux"].shape == (2, 4, 32, 32)


@pytest.mark.parametrize(
    "ask",
    [
        pytest.param(lambda: from_torchvision("resnet18", 5, weights="DEFAULT"), id="model"),
        pytest.param(lambda: read("torchvision:ResNet18_Weights.DEFAULT"), id="weights"),
    ],
)
def test_a_failed_download_names_the_folder_for_the_file(monkeypatch, ask):
    def refuse(*args, **kwargs):
        raise OSError("network is unreachable")

    monkeypatch.setattr(torchvision.models.ResNet18_Weights, "get_state_dict", refuse)

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
        "name": "vit_small",
        "num_classes": 7,
        "in_chans": 1,
        "pretrained": True,
        "img_size": 16,
    }
    with pytest.raises(NetworkError, match="vit_smell"):
        from_timm("vit_smell", 7)


def test_a_timm_that_is_not_installed_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "timm", None)
    with pytest.raises(MissingPackageError, match=r"regimen\[timm\]"):
        from_timm("resnet18", 7)


TINY = {
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 16,
    "vocab_size": 50,
}


@pytest.fixture
def _transformers():
    pytest.importorskip("transformers", reason="the extra transformers is not installed")


TINY_GPT = {"n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 8}


@pytest.mark.usefixtures("_transformers")
def test_logits_equal_those_of_transformers():
    model = from_transformers("bert", 3, config=TINY).eval()
    tokens = torch.arange(10).view(2, 5)
    mask = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 0, 0, 0]])

    logits = model({"input_ids": tokens, "attention_mask": mask})

    expected = model.model(input_ids=tokens, attention_mask=mask).logits
    assert torch.equal(logits, expected)
    assert logits.shape == model(tokens).shape == (2, 3)


@pytest.mark.usefixtures("_transformers")
def test_a_causal_language_model_has_a_logit_for_each_word():
    model = from_transformers("gpt2", 50, auto="AutoModelForCausalLM", config=TINY_GPT)

    logits = model(torch.zeros(2, 8, dtype=torch.long))

    assert logits.shape == (2, 8, 50)


@pytest.mark.usefixtures("_transformers")
@pytest.mark.parametrize(
    ("auto", "size"),
    [
        ("AutoModelForCausalLM", "vocab_size"),
        ("AutoModelForSequenceClassification", "num_labels"),
    ],
)
def test_classes_that_nothing_counts_are_as_many_as_the_configuration_says(auto, size):
    model = from_transformers("gpt2", None, auto=auto, config={**TINY_GPT, size: 7})

    assert getattr(model.model.config, size) == 7


@pytest.mark.usefixtures("_transformers")
def test_a_folder_is_loaded_with_a_new_head(tmp_path):
    model = from_transformers("bert", 3, config=TINY)
    model.model.save_pretrained(tmp_path)

    again = from_transformers(str(tmp_path), 3)
    other = from_transformers(str(tmp_path), 5)

    assert_same(again, model)
    assert_same(other, model, except_for="model.classifier")
    assert other(torch.zeros(2, 4, dtype=torch.long)).shape == (2, 5)


@pytest.mark.usefixtures("_transformers")
def test_invalid_arguments_raise_errors_that_name_the_key(tmp_path):
    with pytest.raises(NetworkError, match=r"model\.auto: transformers has no 'AutoModel'"):
        from_transformers("bert", 3, auto="AutoModel", config=TINY)
    with pytest.raises(NetworkError, match=r"model\.name="):
        from_transformers("bertt", 3, config=TINY)
    with pytest.raises(ConfigError, match=r"model\.name: there is no folder .*/absent/folder"):
        from_transformers(str(tmp_path / "absent" / "folder"), 3)


@pytest.mark.parametrize(
    ("classes", "head"),
    [
        pytest.param(1000, {"fc.weight", "fc.bias"}, id="the weights' classes"),
        pytest.param(3, set(), id="a new head"),
    ],
)
def test_what_torchvision_weights_were_read_into_is_known(monkeypatch, tmp_path, classes, head):
    state = torchvision.models.resnet18().state_dict()
    path = tmp_path / "resnet18.pth"
    torch.save(state, path)
    monkeypatch.setattr(torchvision_adapter, "fetch", lambda entry: state)
    monkeypatch.setattr(torchvision_adapter, "cached_file", lambda entry: path)

    model = from_torchvision("resnet18", classes, weights="DEFAULT")

    ((source, names),) = sources_of({"": model}).items()
    assert [*source.files] == [path]
    others = {name for name, _ in model.named_parameters() if not name.startswith("fc.")}
    assert names == others | head
