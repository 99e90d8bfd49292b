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
        generator = torch.Generator().manual_seed(3)
        self.tokens = torch.randint(tokens, (count, LENGTH), generator=generator)

    def __len__(self):
        return len(self.tokens)

    def __getitem__(self, index):
        learnt = 0 if index % 5 == 0 else index % LENGTH
        labels = self.tokens[index].clone()
        labels[learnt + 1 :] = -100
        return {"input_ids": self.tokens[index], "labels": labels}


def batch_of(count):
    """Return the first rows as one batch."""
    rows = Rows(count)
    return torch.utils.data.default_collate([rows[i] for i in range(count)])


def network(tied=True, **options):
    torch.manual_seed(3)
    sizes = SMALL | options
    config = llama_config(**sizes, tie_word_embeddings=tied)
    return Logits(transformers.LlamaForCausalLM(config)).double()


def loss_of(task, model, batch):
    return task.training_step(model, batch).loss[""]


@pytest.mark.parametrize("steps", [1, 2, 4])
@pytest.mark.parametrize("tied", [True, False])
def test_an_update_is_that_of_the_logits(steps, tied):
    plain = toys.trainer_of(Chat(), loader(Rows()), model=network(tied))
    plain.fit()
    chunked = toys.trainer_of(Chat(chunked_loss=True), loader(Rows(), steps), model=network(tied))
    chunked.fit()

    assert_equal(chunked.model, plain.model)


def losses_and_gradients(task, model, batch):
    loss = loss_of(task, model, batch)
    loss.backward()
    trained = [p for p in model.parameters() if p.requires_grad]
    return loss.detach(), [p.grad for p in trained]


def with_adapters(folder):
    pytest.importorskip("peft", reason="the extra peft is not installed")
    path = write_model(folder / "model", **SMALL)
    return build_lora(str(path), None, rank=2).double()


def with_a_bias(folder):
    model = network(tied=False)
    model.model.lm_head = nn.Linear(16, 512, dtype=torch.float64)
    return model


def of_transformers_itself(folder):
    return network().model


@pytest.mark.parametrize("build", [with_adapters, with_a_bias, of_transformers_itself])
def test_a_training_step_is_that_of_the_logits_with_other_models_too(build, tmp_path):
    def losses_of(task):
        torch.manual_seed(0)
        return losses_and_gradients(task, build(tmp_path), batch_of(6))

    loss, gradients = losses_of(Chat(chunked_loss=True))
    expected_loss, expected_gradients = losses_of(Chat())

    torch.testing.assert_close(loss, expected_loss, rtol=1e-12, atol=0)
    torch.testing.assert_close(gradients, expected_gradients, rtol=0, atol=1e-13)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_short_formats_lose_no_digits_of_the_loss(dtype):
    model = network().to(dtype)
    rounded = network().to(dtype).double()  # the same weights, computed exactly
    batch = batch_of(6)
    with torch.no_grad():
        exact = loss_of(Chat(), rounded, batch).item()
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype is torch.float32):
            found = loss_of(Chat(chunked_loss=True), model, batch).item()

    assert found == pytest.approx(exact, rel=2e-3)


def test_a_micro_batch_without_a_label_has_no_gradient():
    batch = batch_of(6)
    batch["labels"][:] = -100
    loss, gradients = losses_and_gradients(Chat(chunked_loss=True), network(), batch)

    assert loss == 0
    for gradient in gradients:
        assert not gradient.any()


@pytest.mark.slow  # the import of the compiler
def test_a_compiled_model_has_the_same_loss():
    model = network()
    model.compile(backend="eager")
    task = Chat(chunked_loss=True)
    for count in (4, 6, 8):
        batch = batch_of(count)
        found = loss_of(task, model, batch)
        expected = loss_of(Chat(), network(), batch)
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=0)


def test_an_evaluation_computes_logits():
    task = Chat(chunked_loss=True)
    found = task.evaluation_step(network(), batch_of(6))
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
        logits = self.model(input_ids=input_ids).logits
        return self.change(logits)


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
    task = Chat(chunked_loss=True)
    with pytest.raises(ModelError, match="scales or caps its logits"):
        task.training_step(Scaled(change), batch_of(2))


def test_models_of_transformers_with_caps_are_refused():
    config = transformers.Gemma2Config(
        vocab_size=512,
        head_dim=8,
        num_attention_heads=2,
        num_key_value_heads=1,
        **SMALL,
    )
    model = transformers.Gemma2ForCausalLM(config)
    task = Chat(chunked_loss=True)

    with pytest.raises(ModelError, match="scales or caps its logits"):
        task.training_step(model, batch_of(2))

    answer = model(input_ids=torch.zeros(1, 3, dtype=torch.long))  # it works as before
    assert answer.logits.shape == (1, 3, 512)


def test_a_model_without_a_linear_output_layer_is_refused():
    task = Chat(chunked_loss=True)
    model = network()
    model.model.lm_head = nn.Sequential(nn.Linear(16, 512))

    with pytest.raises(ModelError, match=r"is torch\.nn\.modules\.container\.Sequential"):
        task.training_step(model, batch_of(2))
    with pytest.raises(ModelError, match="has no get_output_embeddings"):
        task.training_step(nn.Linear(2, 2), batch_of(2))


def test_a_torch_without_it_is_refused(monkeypatch):
    monkeypatch.delattr(nn.functional, "linear_cross_entropy")
    with pytest.raises(ModelError, match="has no linear_cross_entropy"):
        Chat(chunked_loss=True)
