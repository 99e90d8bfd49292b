"""A language model's loss in chunks is that of its logits, or it is refused."""

import pytest
import torch
from torch import nn

import toys
from regimen.trainer.errors import ModelError
from regimen.trainer.tasks.chat import Chat
from toys import assert_equal, loader

transformers = pytest.importorskip("transformers", reason="the extra transformers is missing")
if not hasattr(nn.functional, "linear_cross_entropy"):
    pytest.skip("this torch has no linear_cross_entropy", allow_module_level=True)

from regimen.models.lora import build as build_lora  # noqa: E402
from regimen.models.transformers_adapter import Logits  # noqa: E402
from toy_chat import llama_config, write_model  # noqa: E402

LENGTH = 12
SMALL = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1}


class Rows(torch.utils.data.Dataset):
    """Rows with between 1 and 11 learnt tokens; every fifth has none."""

    def __init__(self, count=24, tokens=512):
        self.tokens = torch.randint(
            tokens, (count, LENGTH), generator=torch.Generator().manual_seed(3)
        )

    def __len__(self):
        return len(self.tokens)

    def __getitem__(self, index):
        labels = self.tokens[index].clone()
        learnt = 0 if index % 5 == 0 else index % LENGTH
        labels[learnt + 1 :] = -100
        return {"input_ids": self.tokens[index], "labels": labels}


def batch_of(rows):
    samples = [rows[i] for i in range(len(rows))]
    return {name: torch.stack([sample[name] for sample in samples]) for name in samples[0]}


def network(tied=True, **options):
    torch.manual_seed(3)
    config = llama_config(**{**SMALL, **options}, tie_word_embeddings=tied)
    return Logits(transformers.LlamaForCausalLM(config)).double()


@pytest.mark.parametrize("steps", [1, 2, 4])
@pytest.mark.parametrize("tied", [True, False])
def test_an_update_is_that_of_the_logits(steps, tied):
    plain = toys.trainer_of(Chat(), loader(Rows()), model=network(tied))
    plain.fit()
    chunked = toys.trainer_of(Chat(chunked_loss=True), loader(Rows(), steps), model=network(tied))
    chunked.fit()
    assert_equal(chunked.model, plain.model)


def losses_and_gradients(task, model, batch):
    output = task.training_step(model, batch)
    output.loss[""].backward()
    trained = [p for p in model.parameters() if p.requires_grad]
    return output.loss[""].detach(), [p.grad for p in trained]


@pytest.mark.parametrize("kind", ["adapters", "bias", "transformers itself"])
def test_of_other_models_too(kind, tmp_path):
    def build():
        torch.manual_seed(0)
        if kind == "adapters":
            folder = write_model(tmp_path / "model", **SMALL)
            pytest.importorskip("peft", reason="the extra peft is not installed")
            return build_lora(str(folder), None, rank=2).double()
        if kind == "bias":
            model = network(tied=False)
            model.model.lm_head = nn.Linear(16, 512, dtype=torch.float64)
            return model
        return network().model

    batch = batch_of(Rows(6))
    loss, gradients = losses_and_gradients(Chat(), build(), batch)
    found, others = losses_and_gradients(Chat(chunked_loss=True), build(), batch)
    torch.testing.assert_close(found, loss, rtol=1e-12, atol=0)
    for one, other in zip(gradients, others, strict=True):
        torch.testing.assert_close(other, one, rtol=0, atol=1e-13)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_short_formats_lose_no_digits_of_the_loss(dtype):
    model = network().to(dtype)
    batch = batch_of(Rows(6))
    with torch.no_grad():
        exact = Chat().training_step(network().to(dtype).double(), batch).loss[""]
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype is torch.float32):
            found = Chat(chunked_loss=True).training_step(model, batch).loss[""]
    assert float(found) == pytest.approx(float(exact), rel=2e-3)


def test_a_micro_batch_without_a_label_has_no_gradient():
    model = network()
    batch = batch_of(Rows(6))
    batch["labels"][:] = -100
    loss, gradients = losses_and_gradients(Chat(chunked_loss=True), model, batch)
    assert float(loss) == 0
    assert not any(gradient.any() for gradient in gradients)


@pytest.mark.slow  # the import of the compiler
def test_a_compiled_model_has_the_same_loss():
    model = network()
    model.compile(backend="eager")
    task = Chat(chunked_loss=True)
    for count in (4, 6, 8):
        batch = batch_of(Rows(count))
        found = task.training_step(model, batch).loss[""]
        expected = Chat().training_step(network(), batch).loss[""]
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=0)


def test_an_evaluation_computes_logits():
    batch = batch_of(Rows(6))
    found = Chat(chunked_loss=True).evaluation_step(network(), batch)
    assert found.output.shape == (6, 512, LENGTH)
    assert "token_accuracy" in found.sums


@pytest.mark.parametrize(
    "task",
    [
        pytest.param({"loss": nn.CrossEntropyLoss(label_smoothing=0.1)}, id="smoothing"),
        pytest.param({"loss": nn.CrossEntropyLoss(weight=torch.ones(3))}, id="weights"),
        pytest.param({"loss": nn.CrossEntropyLoss(reduction="sum")}, id="sum"),
        pytest.param({"loss": {"a": nn.CrossEntropyLoss()}}, id="several"),
        pytest.param({"loss": nn.NLLLoss()}, id="another"),
    ],
)
def test_another_loss_is_refused(task):
    with pytest.raises(ModelError, match=r"task\.chunked_loss"):
        Chat(**task, chunked_loss=True)


class Scaled(nn.Module):
    """A model that changes its logits behind its output layer."""

    def __init__(self, change):
        super().__init__()
        self.model = network().model
        self.change = change

    def forward(self, input_ids):
        return self.change(self.model(input_ids=input_ids).logits)


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(lambda logits: logits / 8, id="scale"),
        pytest.param(lambda logits: 30 * torch.tanh(logits / 30), id="cap"),
        pytest.param(lambda logits: logits + 1, id="shift"),
        pytest.param(lambda logits: logits.sum(), id="shape"),
    ],
)
def test_a_model_that_changes_its_logits_is_refused(change):
    with pytest.raises(ModelError, match="scales or caps its logits"):
        Chat(chunked_loss=True).training_step(Scaled(change), batch_of(Rows(2)))


def test_models_of_transformers_with_caps_are_refused():
    config = transformers.Gemma2Config(
        vocab_size=512, head_dim=8, num_attention_heads=2, num_key_value_heads=1, **SMALL
    )
    model = transformers.Gemma2ForCausalLM(config)
    with pytest.raises(ModelError, match="scales or caps its logits"):
        Chat(chunked_loss=True).training_step(model, batch_of(Rows(2)))
    assert model(input_ids=torch.zeros(1, 3, dtype=torch.long)).logits.shape == (1, 3, 512)


def test_a_model_without_a_linear_output_layer_is_refused():
    model = network()
    model.model.lm_head = nn.Sequential(nn.Linear(16, 512))
    with pytest.raises(ModelError, match=r"is torch\.nn\.modules\.container\.Sequential"):
        Chat(chunked_loss=True).training_step(model, batch_of(Rows(2)))
    with pytest.raises(ModelError, match="has no get_output_embeddings"):
        Chat(chunked_loss=True).training_step(nn.Linear(2, 2), batch_of(Rows(2)))


def test_a_torch_without_it_is_refused(monkeypatch):
    monkeypatch.delattr(nn.functional, "linear_cross_entropy")
    with pytest.raises(ModelError, match="has no linear_cross_entropy"):
        Chat(chunked_loss=True)
