"""Adapters: what a layer computes, what is trained, and what is refused (L4)."""

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
from regimen.trainer.optimizers.optimizers import build_optimizers
from toy_chat import write_model

SMALL = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
ADAMW = {"_target_": "torch.optim.AdamW", "lr": 0.01}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return str(write_model(tmp_path_factory.mktemp("llama")))


@pytest.fixture(scope="module")
def parted(tmp_path_factory):
    folder = tmp_path_factory.mktemp("parted")
    return str(write_model(folder, tie_word_embeddings=False))


def tokens():
    return torch.randint(512, (2, 9), generator=torch.Generator().manual_seed(1))


def fill(model):
    """Give each B values, as training does."""
    generator = torch.Generator().manual_seed(2)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            parameter.data = torch.randn(parameter.shape, generator=generator).to(parameter) / 10


def test_a_layer_is_w_plus_b_a_alpha_over_rank(folder):
    import transformers

    model = build(folder, 512, rank=4, alpha=6, targets=["q_proj", "down_proj"]).double()
    plain = transformers.AutoModelForCausalLM.from_pretrained(folder).double()
    given = {"input_ids": tokens()}
    with torch.no_grad():
        # B is zero at first.
        assert torch.equal(model(**given), plain(**given).logits)
        fill(model)
        layers = dict(model.model.named_modules())
        changed = 0
        for name, layer in plain.named_modules():
            if name.endswith(("q_proj", "down_proj")):
                adapter = layers[name]
                a = adapter.lora_A["default"].weight
                b = adapter.lora_B["default"].weight
                assert a.shape[0] == b.shape[1] == 4
                layer.weight += b @ a * 6 / 4
                changed += 1
        assert changed == 4
        torch.testing.assert_close(model(**given), plain(**given).logits, rtol=0, atol=1e-12)


def test_only_adapters_are_trained_and_the_plan_names_the_rest(folder):
    model = build(folder, 512, rank=2)
    trained = [name for name, p in model.named_parameters() if p.requires_grad]
    assert trained
    assert all("lora_" in name for name in trained)
    table = build_optimizers(model, ADAMW).table()
    assert [row.group for row in table] == ["default", "frozen"]
    assert table[0].parameters == sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert not any("lm_head" in name for name in trained)  # the output layer is not all-linear's
    assert {name.split(".")[-4] for name in trained} == {
        "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"
    }  # fmt: skip


def test_training_is_that_of_a_loop_by_hand(folder):
    """W + B A alpha / rank as plain tensors, through `functional_call` on the plain model."""
    import transformers

    model = build(folder, 512, rank=2, alpha=8, targets=["q_proj"]).double().train()
    plain = transformers.AutoModelForCausalLM.from_pretrained(folder).double()
    layers = {n: m for n, m in model.model.named_modules() if n.endswith("q_proj")}
    pairs = {
        f"{name}.weight": [
            layer.lora_A["default"].weight.detach().clone().requires_grad_(),
            layer.lora_B["default"].weight.detach().clone().requires_grad_(),
        ]
        for name, layer in layers.items()
    }
    ours = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01)
    theirs = torch.optim.AdamW([p for pair in pairs.values() for p in pair], lr=0.01)
    weights = {name: parameter.detach() for name, parameter in plain.named_parameters()}
    given = tokens()
    for _ in range(3):
        loss = F.cross_entropy(model(input_ids=given)[:, :-1].flatten(0, 1), given[:, 1:].flatten())
        ours.zero_grad()
        loss.backward()
        ours.step()
        changed = {name: weights[name] + b @ a * 8 / 2 for name, (a, b) in pairs.items()}
        output = torch.func.functional_call(plain, changed, (), {"input_ids": given})
        by_hand = F.cross_entropy(output.logits[:, :-1].flatten(0, 1), given[:, 1:].flatten())
        torch.testing.assert_close(loss, by_hand, rtol=1e-12, atol=0)
        theirs.zero_grad()
        by_hand.backward()
        theirs.step()
    for name, (a, b) in pairs.items():
        layer = layers[name.removesuffix(".weight")]
        torch.testing.assert_close(layer.lora_A["default"].weight, a, rtol=0, atol=1e-10)
        torch.testing.assert_close(layer.lora_B["default"].weight, b, rtol=0, atol=1e-10)


def test_targets_that_match_nothing_list_the_linear_modules(folder):
    with pytest.raises(NetworkError, match=r"model\.targets.*q_prj") as caught:
        build(folder, 512, targets=["q_prj"])
    assert "q_proj, k_proj, v_proj" in str(caught.value)
    assert caught.value.exit_code == 2
    with pytest.raises(NetworkError, match="rank 0"):
        build(folder, 512, rank=0)


@pytest.mark.parametrize("target", ["lm_head", "embed_tokens"])
def test_a_tied_layer_is_refused_as_a_target(folder, parted, target):
    with pytest.raises(NetworkError, match=rf"model\.targets.*{target} shares its weight"):
        build(folder, 512, targets=["q_proj", target])
    with torch.device("meta"), pytest.raises(NetworkError, match="shares its weight"):
        build(folder, 512, targets=["q_proj", target])
    model = build(parted, 512, targets=["q_proj", target])
    assert any(target in name for name, p in model.named_parameters() if p.requires_grad)


def test_weights_are_not_read_on_meta_nor_for_a_checkpoint(folder):
    model = build(folder, 512)
    with no_initial_weights():
        other = build(folder, 512)
    assert model.state_dict().keys() == other.state_dict().keys()
    other.load_state_dict(model.state_dict())
    fill(model)
    with torch.device("meta"):
        assert all(p.is_meta for p in build(folder, 512).parameters())


def test_a_vocabulary_larger_than_the_models_is_refused(folder):
    with pytest.raises(NetworkError, match="vocabulary of 512 tokens, and the data have 513"):
        build(folder, 513)
    with pytest.raises(NetworkError, match=r"model\.name"):
        build(f"{folder}/nowhere/at/all", 512)


def test_a_context_beyond_the_learnt_positions_is_refused(folder, tmp_path):
    import transformers

    config = transformers.GPT2Config(vocab_size=512, n_positions=32, n_embd=16, n_layer=1, n_head=2)
    transformers.GPT2LMHeadModel(config).save_pretrained(tmp_path)
    for make in (build, build_transformers):
        make(str(tmp_path), 512, auto="AutoModelForCausalLM", context=32)
        with pytest.raises(NetworkError, match=r"data\.context.*33 tokens.*32 positions") as caught:
            make(str(tmp_path), 512, auto="AutoModelForCausalLM", context=33)
        assert caught.value.exit_code == 2
    build(folder, 512, context=100_000)  # rotary positions


def test_code_of_a_models_folder_is_not_run(tmp_path):
    config = {"model_type": "own", "auto_map": {"AutoConfig": "own.Own"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "own.py").write_text("raise SystemExit('run')")
    with pytest.raises(ConfigError, match=r"model\.name: .*code of its own, which is not run"):
        build(str(tmp_path), 512)


def test_a_model_knows_which_files_its_weights_were_read_from(folder, tmp_path):
    import transformers

    plain = transformers.AutoModelForCausalLM.from_pretrained(folder)
    plain.save_pretrained(tmp_path, max_shard_size="150KB")
    (source,) = sources_of({"": build(str(tmp_path), 512, rank=2)})
    assert len(source.files) > 1
    assert sorted(source.files) == sorted(tmp_path.glob("*.safetensors"))
    # Tied weights under both names, and adapted layers under their new ones.
    model = build(folder, 512, rank=2)
    ((source, names),) = sources_of({"": model}).items()
    assert source.by_default
    assert names == {name for name in model.state_dict() if "lora_" not in name}
    # A head that is new was read from nowhere.
    model = build(folder, 3, rank=2, auto="AutoModelForSequenceClassification")
    ((_, names),) = sources_of({"": model}).items()
    frozen = {name for name, p in model.named_parameters() if not p.requires_grad}
    assert frozen - names == {"model.score.base_layer.weight"}
    for other in (build(folder, 512, pretrained=False), build("llama", 512, config=SMALL)):
        assert not sources_of({"": other})
