"""Folders for transformers and peft: those libraries read them, and answer as the model does."""

import json
import shutil
from copy import deepcopy

import pytest
import torch
from torch import nn

pytest.importorskip("peft", reason="the extra peft is not installed")

from regimen.models.lora import build
from regimen.models.transformers_adapter import Logits
from regimen.scripts.cli.arguments import RunRequest, parse_arguments
from regimen.scripts.composition.compose import compose
from regimen.scripts.runs.run import run as train
from regimen.trainer.components.precision import Precision
from regimen.trainer.errors import ModelError
from regimen.trainer.export import artefact
from regimen.trainer.export.artefact import evaluate_artefact, export_run
from regimen.trainer.export.formats import how_to_load
from regimen.trainer.inference.run import evaluate_run, load_run
from toy_chat import CHATML, conversations, write_model, write_rows

FEW = ["data.context=128", "loader.batch_size=8", "trainer.max_epochs=2", "optimizer.lr=1e-3"]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Return a folder with a small model of chats, whose texts end with one of two tokens."""
    root = tmp_path_factory.mktemp("chat")
    model = write_model(root / "model")
    place = model / "generation_config.json"
    said = json.loads(place.read_text())
    said["eos_token_id"] = [1, 7]
    place.write_text(json.dumps(said))
    write_rows(root / "data/train.jsonl", conversations(40))
    write_rows(root / "data/val.jsonl", conversations(8, 40))
    (root / "template.jinja").write_text(CHATML + "{# own #}")
    return root


def trained(folders, path, *more):
    words = [
        "experiment=chat",
        f"model.name={folders / 'model'}",
        f"data.root={folders / 'data'}",
        f"data.template={folders / 'template.jinja'}",
        *FEW,
        "callbacks.progress=null",
        *more,
        f"run_dir={path}",
    ]
    composed = compose(parse_arguments(words))
    request = RunRequest(composed.config, composed.overrides, {}, words)
    assert train(request) == 0
    return load_run(path, "cpu")


@pytest.fixture(scope="module")
def run(folders):
    return trained(folders, folders / "run", "callbacks=[default,ema]", "callbacks.ema.decay=0.5")


def tokens(count=3, length=40):
    generator = torch.Generator().manual_seed(5)
    return torch.randint(512, (count, length), generator=generator)


def replace_model(monkeypatch, run, model):
    """Let the run have another model than the one that it trained."""
    model.eval()
    monkeypatch.setattr(run, "model", lambda checkpoint: model)


def answers(model):
    with torch.no_grad():
        found = model(input_ids=tokens())
    return getattr(found, "logits", found)


def read(module, name, place, **options):
    """Read a folder by a class of transformers or peft."""
    kind = getattr(module, name)
    return kind.from_pretrained(place, **options).eval()


def test_peft_reads_the_adapter_and_the_model_answers_the_same(run, folders, tmp_path):
    import peft
    import transformers

    expected = answers(run.model())
    path, facts = export_run(run, "peft", tmp_path / "adapter")

    base = read(transformers, "AutoModelForCausalLM", folders / "model")
    model = peft.PeftModel.from_pretrained(base, path.parent)

    assert torch.equal(answers(model), expected)

    # Without the name of the frozen model: the adapter's configuration has it.
    named = read(peft, "AutoPeftModelForCausalLM", path.parent)
    assert torch.equal(answers(named), expected)

    said = json.loads((path.parent / "adapter_config.json").read_text())
    weights_of_base = folders / "model/model.safetensors"
    assert said["base_model_name_or_path"] == str(folders / "model")
    assert said["r"] == 16
    assert said["lora_alpha"] == 32
    assert path.stat().st_size < weights_of_base.stat().st_size
    assert facts["verified"]["largest_difference"] == 0.0


def test_transformers_reads_the_merged_model(run, tmp_path):
    import transformers

    before = answers(run.model())
    path, facts = export_run(run, "huggingface", tmp_path / "merged")
    model = read(transformers, "AutoModelForCausalLM", path.parent)

    torch.testing.assert_close(answers(model), before, rtol=0, atol=1e-6)
    assert 0 < facts["verified"]["largest_difference"] < 1e-6
    for name in model.state_dict():
        assert "lora" not in name
        assert "base_layer" not in name
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert model.generation_config.eos_token_id == [1, 7]  # that of the original
    assert torch.equal(answers(run.model()), before)  # the run's own has its adapters still


def test_what_is_exported_is_the_average_that_was_evaluated(run, tmp_path):
    from safetensors.torch import load_file

    path, _ = export_run(run, "peft", tmp_path / "adapter")
    average = run.model().state_dict()
    checkpoint = torch.load(run.path / "checkpoints/best.pt", weights_only=True)

    for name, value in load_file(path).items():
        ours = name.removeprefix("base_model.").replace(".weight", ".default.weight")
        assert torch.equal(value, average[ours])

    last = checkpoint["model"]
    differ = [name for name, value in last.items() if not torch.equal(value, average[name])]
    assert differ != []  # so the test can fail


@pytest.mark.parametrize("name", ["peft", "huggingface"])
def test_the_folder_has_the_tokenizer_and_lines_that_load_it(run, tmp_path, name):
    path, facts = export_run(run, name, tmp_path / "out")
    names = {}
    exec("\n".join(how_to_load(facts, path.parent)), names)
    model = names["model"].eval()
    tokenizer = names["tokenizer"]

    torch.testing.assert_close(answers(model), answers(run.model()), rtol=0, atol=1e-6)

    chat = [{"role": "user", "content": "tea?"}]
    said = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    assert said == "<|im_start|>user\ntea?<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.chat_template.endswith("{# own #}")
    assert "from transformers import" in (path.parent / "card.md").read_text()

    _, expected = evaluate_run(run.config, run.path, "best", "val")
    split, found = evaluate_artefact(run.config, path, "val")
    assert split == "val"
    assert found == pytest.approx(expected, abs=1e-5)


def test_all_weights_are_exported_for_transformers_alone(folders, tmp_path):
    import transformers

    run = trained(folders, tmp_path / "run", "model=transformers", "trainer.precision=fp64")
    with pytest.raises(ModelError, match=r"no adapters.*use format=huggingface") as caught:
        export_run(run, "peft", tmp_path / "out")
    assert caught.value.exit_code == 2
    assert [entry.name for entry in tmp_path.iterdir()] == ["run"]

    path, _ = export_run(run, "huggingface", tmp_path / "out")
    model = read(transformers, "AutoModelForCausalLM", path.parent)
    assert model.dtype == torch.float64
    assert torch.equal(answers(model), answers(run.model()))


def test_a_classifier_keeps_its_head(run, tmp_path, monkeypatch):
    import transformers

    config = transformers.BertConfig(
        vocab_size=512,
        hidden_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=32,
        num_labels=5,
    )
    model = Logits(transformers.BertForSequenceClassification(config))
    replace_model(monkeypatch, run, model)

    path, _ = export_run(run, "huggingface", tmp_path / "out")

    read_again = read(transformers, "AutoModelForSequenceClassification", path.parent)

    assert torch.equal(answers(read_again), answers(model))


def test_half_precision_is_merged_in_single_precision(run, folders, tmp_path, monkeypatch):
    import transformers

    model = build(str(folders / "model"), 512)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.01)
    model = Precision("bf16_true").convert(model)
    replace_model(monkeypatch, run, model)

    for name in ("huggingface", "peft"):
        export_run(run, name, tmp_path / name)

    merged = read(transformers, "AutoModelForCausalLM", tmp_path / "huggingface")

    assert merged.dtype == torch.float32
    assert next(model.parameters()).dtype == torch.bfloat16


def test_adapters_within_adapters_are_merged(run, tmp_path, monkeypatch):
    """Of a mixture of experts: each of the two stacks of weights of a layer has its own."""
    import transformers

    sizes = {"hidden_size": 32, "intermediate_size": 48, "moe_intermediate_size": 16}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
    few = {"num_hidden_layers": 2, "num_experts": 4, "num_experts_per_tok": 2}
    model = build("qwen3_moe", 512, config={**sizes, **heads, **few})
    nested = [name for name, _ in model.named_parameters() if ".base_layer.lora_B" in name]
    assert len(nested) == 2
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.05)
    replace_model(monkeypatch, run, model)
    expected = answers(model)

    path, _ = export_run(run, "huggingface", tmp_path / "merged")

    merged = read(transformers, "AutoModelForCausalLM", path.parent)
    assert (answers(merged) - expected).abs().max() < 1e-5


def test_a_model_in_bfloat16_is_the_one_that_transformers_reads_in_it(folders):
    """Its rotary positions are not rounded, which one knows only far behind the first."""
    import transformers

    far = tokens(1, length=400)
    kind = transformers.AutoModelForCausalLM
    read_in_it = kind.from_pretrained(folders / "model", dtype=torch.bfloat16)
    single = kind.from_pretrained(folders / "model", dtype=torch.float32)

    converted = Precision("bf16_true").convert(single)
    rounded = deepcopy(converted).to(torch.bfloat16)
    with torch.no_grad():
        expected = read_in_it(input_ids=far).logits
        found = converted(input_ids=far).logits
        of_rounded = rounded(input_ids=far).logits

    assert {parameter.dtype for parameter in converted.parameters()} == {torch.bfloat16}
    assert torch.equal(found, expected)
    assert not torch.equal(of_rounded, expected)  # so the test can fail

    wide = Precision("fp64").convert(converted)
    assert {buffer.dtype for buffer in wide.buffers()} == {torch.float64}


def test_an_adapter_of_a_base_that_has_changed_is_refused(run, folders, tmp_path, monkeypatch):
    """A weight that was trained beside the adapters, or a base that has changed since."""
    model = build(str(folders / "model"), 512)
    nn.init.normal_(model.model.model.norm.weight)
    replace_model(monkeypatch, run, model)
    with pytest.raises(ModelError, match=r"outputs of the peft file differ.*beside the adapters\?"):
        export_run(run, "peft", tmp_path / "out")


def test_an_adapter_of_a_base_that_was_made_anew_is_refused(run, tmp_path, monkeypatch):
    config = {
        "hidden_size": 16,
        "num_hidden_layers": 1,
        "intermediate_size": 16,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
    }
    replace_model(monkeypatch, run, build("llama", 512, config=config))
    with pytest.raises(ModelError, match=r"model\.config.*use format=huggingface"):
        export_run(run, "peft", tmp_path / "out")

    export_run(run, "huggingface", tmp_path / "out")


def test_a_model_of_ones_own_is_refused_and_nothing_is_left(run, tmp_path, monkeypatch):
    replace_model(monkeypatch, run, nn.Linear(2, 2))
    for name in ("peft", "huggingface"):
        with pytest.raises(ModelError, match=r"for models of transformers.*is a Linear"):
            export_run(run, name, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_models_of_peft_itself_are_exported(run, folders, tmp_path, monkeypatch):
    """As a Trainer from Python is given them."""
    import peft
    import transformers

    base = read(transformers, "AutoModelForCausalLM", folders / "model")
    config = peft.LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False)
    model = peft.get_peft_model(base, config).eval()
    expected = answers(model)
    replace_model(monkeypatch, run, model)

    export_run(run, "peft", tmp_path / "adapter")
    base_again = read(transformers, "AutoModelForCausalLM", folders / "model")
    again = peft.PeftModel.from_pretrained(base_again, tmp_path / "adapter")

    assert torch.equal(answers(again), expected)

    export_run(run, "huggingface", tmp_path / "merged")
    merged = read(transformers, "AutoModelForCausalLM", tmp_path / "merged")
    torch.testing.assert_close(answers(merged), expected, rtol=0, atol=1e-6)


def test_a_tokenizer_that_is_gone_is_said(run, tmp_path, monkeypatch):
    node = {**run.config.data.train, "tokenizer": "/nowhere/at/all"}
    monkeypatch.setattr(run.config.data, "train", node)

    path, facts = export_run(run, "peft", tmp_path / "out")

    lines = how_to_load(facts, path.parent)

    assert "data.tokenizer: there is no folder /nowhere/at/all" in facts["notes"][0]
    assert "Tokenizer" not in "\n".join(lines)
    assert not (path.parent / "tokenizer.json").exists()


def test_code_of_a_tokenizer_is_not_run(run, folders, tmp_path, monkeypatch):
    folder = tmp_path / "own"
    shutil.copytree(folders / "model", folder)
    path = folder / "tokenizer_config.json"
    own = {"tokenizer_class": "Own", "auto_map": {"AutoTokenizer": [None, "own.Own"]}}
    path.write_text(json.dumps(json.loads(path.read_text()) | own))
    (folder / "own.py").write_text("raise SystemExit('run')")
    node = dict(run.config.data.train)
    monkeypatch.setattr(run.config.data, "train", node | {"tokenizer": str(folder)})
    _, facts = export_run(run, "peft", tmp_path / "out")
    assert f"data.tokenizer: {folder} is written in Python code of its own" in facts["notes"][0]


def test_a_model_that_cannot_be_asked_is_answered(run, tmp_path, monkeypatch):
    import transformers

    config = transformers.T5Config(
        vocab_size=64,
        d_model=16,
        d_kv=8,
        d_ff=16,
        num_layers=1,
        num_heads=2,
    )
    model = Logits(transformers.T5ForConditionalGeneration(config))
    replace_model(monkeypatch, run, model)

    with pytest.raises(ModelError, match="cannot be read again, or asked: You must specify"):
        export_run(run, "huggingface", tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_pictures_are_those_of_the_run(run, tmp_path, monkeypatch):
    import transformers

    config = transformers.ViTConfig(
        image_size=16,
        patch_size=8,
        num_channels=1,
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=16,
        num_labels=10,
    )
    model = Logits(transformers.ViTForImageClassification(config))
    replace_model(monkeypatch, run, model)
    pictures = torch.randn(32, 1, 16, 16)
    monkeypatch.setattr(artefact, "samples_of", lambda run, names: (pictures, True))

    path, facts = export_run(run, "huggingface", tmp_path / "out")

    again = read(transformers, "AutoModelForImageClassification", path.parent)
    with torch.no_grad():
        found = again(pictures).logits
        expected = model(pictures)

    assert facts["verified"]["samples"] == "of the run"
    assert torch.equal(found, expected)
