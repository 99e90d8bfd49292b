"""Adapters: what a layer computes, what is trained, and what is refused (L4)."""

import itertools
import json

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("peft", reason="the extra peft is not installed")

from regimen.conf.errors import ConfigError
from regimen.models.layers import NetworkError
from regimen.models.lora import build
from regimen.models.pretrained import no_initial_weights
from regimen.models.transformers_adapter import build as build_transformers
from regimen.trainer.checkpoints.borrowed import sources_of
from regimen.trainer.errors import CheckpointError
from regimen.trainer.optimizers.optimizers import build_optimizers
from toy_chat import write_model

SMALL = {
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
}
ADAMW = {"_target_": "torch.optim.AdamW", "lr": 0.01}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return str(write_model(tmp_path_factory.mktemp("llama")))


@pytest.fixture(scope="module")
def parted(tmp_path_factory):
    folder = tmp_path_factory.mktemp("parted")
    return str(write_model(folder, tie_word_embeddings=False))


def tokens():
    generator = torch.Generator().manual_seed(1)
    return torch.randint(512, (2, 9), generator=generator)


def plain_model(folder):
    import transformers

    return transformers.AutoModelForCausalLM.from_pretrained(folder).double()


def trainable(model):
    return [name for name, parameter in model.named_parameters() if parameter.requires_grad]


def fill(model):
    """Give each B values, as training does."""
    generator = torch.Generator().manual_seed(2)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            values = torch.randn(parameter.shape, generator=generator) / 10
            parameter.data = values.to(parameter)


@torch.no_grad()
def test_a_fresh_adapter_changes_nothing(folder):
    """Since B is zero."""
    model = build(folder, 512, rank=4, alpha=6, targets=["q_proj", "down_proj"]).double()

    logits = model(input_ids=tokens())

    expected = plain_model(folder)(input_ids=tokens()).logits
    assert torch.equal(logits, expected)


@torch.no_grad()
def test_a_layer_is_w_plus_b_a_alpha_over_rank(folder):
    model = build(folder, 512, rank=4, alpha=6, targets=["q_proj", "down_proj"]).double()
    fill(model)

    logits = model(input_ids=tokens())

    plain = plain_model(folder)
    adapters = dict(model.model.named_modules())
    changed = 0
    for name, layer in plain.named_modules():
        if name.endswith(("q_proj", "down_proj")):
            a = adapters[name].lora_A["default"].weight
            b = adapters[name].lora_B["default"].weight
            assert a.shape[0] == b.shape[1] == 4
            layer.weight += b @ a * 6 / 4
            changed += 1
    assert changed == 4
    expected = plain(input_ids=tokens()).logits
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-12)


def test_only_adapters_are_trained_and_the_plan_names_the_rest(folder):
    model = build(folder, 512, rank=2)

    trained = trainable(model)
    adapted = set()
    for name in trained:
        layer, kind = name.split(".")[-4:-2]
        assert kind in ("lora_A", "lora_B")
        adapted.add(layer)
    attention = {"q_proj", "k_proj", "v_proj", "o_proj"}
    # All linear layers but the output layer.
    assert adapted == attention | {"gate_proj", "up_proj", "down_proj"}
    default, frozen = build_optimizers(model, ADAMW).table()
    assert default.group == "default"
    assert frozen.group == "frozen"
    parameters = dict(model.named_parameters())
    assert default.parameters == sum(parameters[name].numel() for name in trained)


def next_token_loss(logits, given):
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), given[:, 1:].flatten())


def test_training_is_that_of_a_loop_by_hand(folder):
    """W + B A alpha / rank as plain tensors, through `functional_call` on the plain model."""
    model = build(folder, 512, rank=2, alpha=8, targets=["q_proj"]).double().train()
    plain = plain_model(folder)
    weights = {name: parameter.detach() for name, parameter in plain.named_parameters()}
    layers = {}
    factors = {}
    for name, layer in model.model.named_modules():
        if name.endswith("q_proj"):
            a = layer.lora_A["default"].weight.detach().clone().requires_grad_()
            b = layer.lora_B["default"].weight.detach().clone().requires_grad_()
            layers[name] = layer
            factors[name] = (a, b)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    ours = torch.optim.AdamW(trained, lr=0.01)
    theirs = torch.optim.AdamW([*itertools.chain(*factors.values())], lr=0.01)
    given = tokens()

    for _ in range(3):
        loss = next_token_loss(model(input_ids=given), given)
        ours.zero_grad()
        loss.backward()
        ours.step()

        changed = {}
        for name, (a, b) in factors.items():
            changed[f"{name}.weight"] = weights[f"{name}.weight"] + b @ a * 8 / 2
        output = torch.func.functional_call(plain, changed, (), {"input_ids": given})
        by_hand = next_token_loss(output.logits, given)
        theirs.zero_grad()
        by_hand.backward()
        theirs.step()
        torch.testing.assert_close(loss, by_hand, rtol=1e-12, atol=0)

    for name, (a, b) in factors.items():
        layer = layers[name]
        torch.testing.assert_close(layer.lora_A["default"].weight, a, rtol=0, atol=1e-10)
        torch.testing.assert_close(layer.lora_B["default"].weight, b, rtol=0, atol=1e-10)


def test_targets_that_match_nothing_list_the_linear_modules(folder):
    with pytest.raises(NetworkError, match=r"model\.targets.*q_prj") as caught:
        build(folder, 512, targets=["q_prj"])

    assert "q_proj, k_proj, v_proj" in str(caught.value)
    assert caught.value.exit_code == 2


def test_a_rank_of_zero_is_refused(folder):
    with pytest.raises(NetworkError, match="rank 0"):
        build(folder, 512, rank=0)


@pytest.mark.parametrize("target", ["lm_head", "embed_tokens"])
def test_a_tied_layer_is_refused_as_a_target(folder, target):
    with pytest.raises(NetworkError, match=rf"model\.targets.*{target} shares its weight"):
        build(folder, 512, targets=["q_proj", target])
    with torch.device("meta"), pytest.raises(NetworkError, match="shares its weight"):
        build(folder, 512, targets=["q_proj", target])


@pytest.mark.parametrize("target", ["lm_head", "embed_tokens"])
def test_a_layer_that_is_not_tied_may_be_a_target(parted, target):
    model = build(parted, 512, targets=["q_proj", target])

    assert any(target in name for name in trainable(model))


def test_weights_are_not_read_on_meta_nor_for_a_checkpoint(folder):
    model = build(folder, 512)
    with no_initial_weights():
        other = build(folder, 512)
    assert model.state_dict().keys() == other.state_dict().keys()
    other.load_state_dict(model.state_dict())
    fill(model)

    with torch.device("meta"):
        on_meta = build(folder, 512)

    assert all(parameter.is_meta for parameter in on_meta.parameters())


def test_a_vocabulary_larger_than_the_models_is_refused(folder):
    with pytest.raises(NetworkError, match="vocabulary of 512 tokens, and the data have 513"):
        build(folder, 513)


def test_a_folder_that_is_not_there_is_refused(folder):
    with pytest.raises(ConfigError, match=r"model\.name: there is no folder .*nowhere/at/all"):
        build(f"{folder}/nowhere/at/all", 512)


@pytest.mark.parametrize("make", [build, build_transformers], ids=["lora", "transformers"])
def test_a_context_beyond_the_learnt_positions_is_refused(tmp_path, make):
    import transformers

    config = transformers.GPT2Config(vocab_size=512, n_positions=32, n_embd=16, n_layer=1, n_head=2)
    transformers.GPT2LMHeadModel(config).save_pretrained(tmp_path)

    make(str(tmp_path), 512, auto="AutoModelForCausalLM", context=32)
    with pytest.raises(NetworkError, match=r"data\.context.*33 tokens.*32 positions") as caught:
        make(str(tmp_path), 512, auto="AutoModelForCausalLM", context=33)

    assert caught.value.exit_code == 2


def test_code_of_a_models_folder_is_not_run(tmp_path):
    config = {"model_type": "own", "auto_map": {"AutoConfig": "own.Own"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "own.py").write_text("raise SystemExit('run')")
    with pytest.raises(ConfigError, match=r"model\.name: .*code of its own, which is not run"):
        build(str(tmp_path), 512)


def test_a_context_of_any_length_fits_rotary_positions(folder):
    build(folder, 512, context=100_000)


def test_a_model_knows_which_files_its_weights_were_read_from(folder, tmp_path):
    plain_model(folder).save_pretrained(tmp_path, max_shard_size="150KB")

    (source,) = sources_of({"": build(str(tmp_path), 512, rank=2)})

    assert len(source.files) > 1
    assert sorted(source.files) == sorted(tmp_path.glob("*.safetensors"))


def test_a_model_knows_which_of_its_weights_were_read(folder):
    """Tied weights under both names, and adapted layers under their new ones."""
    model = build(folder, 512, rank=2)

    ((source, names),) = sources_of({"": model}).items()

    assert source.by_default
    assert names == {name for name in model.state_dict() if "lora_" not in name}


def test_a_head_that_is_new_was_read_from_nowhere(folder):
    model = build(folder, 3, rank=2, auto="AutoModelForSequenceClassification")

    ((_, names),) = sources_of({"": model}).items()

    parameters = model.named_parameters()
    frozen = {name for name, parameter in parameters if not parameter.requires_grad}
    assert frozen - names == {"model.score.base_layer.weight"}


def test_weights_that_were_drawn_were_read_from_nowhere(folder):
    assert not sources_of({"": build(folder, 512, pretrained=False)})
    assert not sources_of({"": build("llama", 512, config=SMALL)})


def test_a_folder_of_pickled_weights_alone_is_refused_with_a_way_out(folder, tmp_path):
    model = plain_model(folder)
    model.config.save_pretrained(tmp_path)
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")

    with pytest.raises(CheckpointError, match=r"pytorch_model.bin, a pickle, .* save_pretrained"):
        build(str(tmp_path), 512)


@pytest.mark.parametrize("change", [{"num_hidden_layers": 4}, {"intermediate_size": 96}], ids=str)
def test_weights_of_another_model_than_the_configuration_says_are_refused(folder, tmp_path, change):
    plain_model(folder).save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))

    with pytest.raises(CheckpointError, match=r"its files lack \d+ weights .*model\.layers\."):
        build(str(tmp_path), 512)
    if "intermediate_size" in change:
        with pytest.raises(CheckpointError, match=r"its files lack \d+ weights"):
            build_transformers(str(tmp_path), 3)


@pytest.mark.parametrize("size", [0, 5000])
def test_weights_that_are_not_whole_are_refused(folder, tmp_path, size):
    plain_model(folder).save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    path.write_bytes(path.read_bytes()[:size])

    with pytest.raises(CheckpointError, match=r"model\.name=.*its weights are not whole"):
        build(str(tmp_path), 512)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"targets": ["q_proj", "qproj"]}, r"model\.targets: .*ends with 'qproj'; linear modules"),
        ({"targets": "("}, r"model\.targets: '\(' is no regular expression"),
        ({"alpha": 0}, r"model\.alpha: is 0"),
        ({"dropout": 1.0}, r"model\.dropout: is 1\.0"),
    ],
    ids=str,
)
def test_options_that_would_train_something_else_are_refused(folder, options, message):
    with pytest.raises(NetworkError, match=message):
        build(folder, 512, **options)
