"""Rules: who is meant, who comes first, what is refused."""

from typing import Any

import pytest
import torch
from torch import nn

from regimen.conf.errors import ConfigError
from regimen.models.vit import ViT
from regimen.trainer.optimizers.optimizers import Optimizers, build_optimizers


class Tied(nn.Module):
    """An embedding that is also the head's weight, and a bare parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 4)
        self.scale = nn.Parameter(torch.ones(4))
        self.norm = nn.LayerNorm(4)
        self.head = nn.Linear(4, 5, bias=False)
        self.head.weight = self.embed.weight


class PixelNorm2d(nn.Module):
    """A normalization layer that only its name tells."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(2))


def network() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(1, 2, 3),
        nn.BatchNorm2d(2),
        nn.Flatten(),
        nn.Linear(8, 4),
        nn.Linear(4, 3),
    )


def built(model: nn.Module, rules: Any, kind: str = "SGD", **given: Any) -> Optimizers:
    node = {
        "_target_": f"torch.optim.{kind}",
        "lr": 0.1,
        **given,
        "param_groups": rules,
    }
    return build_optimizers(model, node)


def members(model: nn.Module, rules: Any) -> dict[str, list[str]]:
    """Return the names of the parameters of each group."""
    made = built(model, rules)
    found = {}
    for group in made.groups():
        found[group.name] = [made.names[parameter] for parameter in group.options["params"]]
    return found


@pytest.mark.parametrize(
    ("rule", "expected"),
    [
        pytest.param({"match": "^4"}, "4.weight 4.bias", id="name"),
        pytest.param({"match": ["^4.*bias", "^0.*bias"]}, "0.bias 4.bias", id="names"),
        pytest.param({"module": "norm"}, "1.weight 1.bias", id="norm"),
        pytest.param({"module": "conv"}, "0.weight 0.bias", id="conv"),
        pytest.param({"module": "torch.nn.Linear"}, "3.weight 3.bias 4.weight 4.bias", id="class"),
        pytest.param({"kind": "bias"}, "0.bias 1.bias 3.bias 4.bias", id="bias"),
        pytest.param({"kind": "vector", "except": {"kind": "bias"}}, "1.weight", id="but-bias"),
        pytest.param({"kind": "ndim<=1"}, "0.bias 1.weight 1.bias 3.bias 4.bias", id="ndim"),
        pytest.param({"kind": "matrix"}, "3.weight 4.weight", id="matrix"),
        pytest.param({"kind": ["kernel", "ndim > 8"]}, "0.weight", id="kernel"),
        pytest.param({"kind": "ndim >= 3"}, "0.weight", id="ndim-spaced"),
        pytest.param({"kind": "weight", "match": "^4"}, "4.weight", id="both-conditions"),
        pytest.param(
            {"except": {"module": "norm", "match": "^[34]"}}, "0.weight 0.bias", id="except-any"
        ),
    ],
)
def test_a_rule_means(rule: dict[str, Any], expected: str) -> None:
    model = network()
    names = [name for name, _ in model.named_parameters()]
    chosen = expected.split()

    groups = members(model, {"chosen": rule})

    assert groups["chosen"] == chosen
    assert groups["default"] == [name for name in names if name not in chosen]


def test_the_first_rule_that_accepts_a_parameter_wins() -> None:
    rules = {
        "head": {"match": "^4"},
        "biases": {"kind": "bias"},
        "linear": {"module": "linear"},
        "dropped": None,
    }
    groups = members(network(), rules)
    assert list(groups.items()) == [
        ("head", ["4.weight", "4.bias"]),
        ("biases", ["0.bias", "1.bias", "3.bias"]),
        ("linear", ["3.weight"]),
        ("default", ["0.weight", "1.weight"]),
    ]


@pytest.mark.quick
def test_every_trainable_parameter_is_in_exactly_one_group() -> None:
    rules = {"norm": {"module": "norm"}, "vectors": {"kind": "vector"}}
    groups = members(Tied(), rules)
    placed = []
    for names in groups.values():
        placed += names
    expected = [name for name, _ in Tied().named_parameters()]

    assert sorted(placed) == sorted(expected)
    assert groups["vectors"] == ["scale"]


@pytest.mark.parametrize("rule", [{"match": "^head"}, {"kind": "embedding"}, {"module": "linear"}])
def test_a_tied_parameter_has_two_names(rule: dict[str, str]) -> None:
    groups = members(Tied(), {"tied": rule})
    assert groups["tied"] == ["embed.weight"]


def test_frozen_rules_take_parameters_out_and_stop_their_gradients() -> None:
    model = network()
    made = built(model, {"body": {"except": {"match": "^4"}, "frozen": True}})

    head = ["4.weight", "4.bias"]
    trained = [name for name, p in model.named_parameters() if p.requires_grad]
    rows = [(row.group, row.tensors) for row in made.table()]

    assert trained == head
    assert [made.names[parameter] for parameter in made.parameters()] == head
    assert rows == [("default", 2), ("frozen", 6)]


def test_parameters_frozen_before_stay_out_and_their_rules_still_match() -> None:
    model = network()
    model[4].requires_grad_(False)
    groups = members(model, {"head": {"match": "^4"}, "norm": {"module": "norm"}})
    assert list(groups) == ["norm", "default"]


def test_norms_of_others_and_biases_of_recurrent_and_attention_layers_are_known() -> None:
    model = nn.ModuleList([nn.LSTM(2, 2), nn.MultiheadAttention(2, 1), PixelNorm2d()])
    groups = members(model, {"norm": {"kind": "norm"}, "bias": {"kind": "bias"}})
    assert groups["norm"] == ["2.gain"]

    biases = ["0.bias_ih_l0", "0.bias_hh_l0", "1.in_proj_bias", "1.out_proj.bias"]
    assert groups["bias"] == biases


def test_learning_rate_decays_layer_by_layer() -> None:
    """Layer d of L learns at lr * decay ** (L - 1 - d), as for BEiT."""
    layers = ["embed|token", r"blocks\.(\d+)\.", ".*"]
    rules = {
        "no_decay": {
            "kind": ["bias", "norm"],
            "weight_decay": 0.0,
            "layer_decay": 0.5,
            "layers": layers,
        },
        "weights": {
            "match": ".*",
            "layer_decay": 0.5,
            "lr": 1.6,
            "layers": layers,
        },
    }
    model = ViT(num_classes=3, image_size=8, dim=12, depth=2, heads=2)
    made = built(model, rules, "AdamW", lr=0.8)

    assert list(made.learning_rates().items()) == [
        ("no_decay.0", 0.1),
        ("no_decay.1", 0.2),
        ("no_decay.2", 0.4),
        ("no_decay.3", 0.8),
        ("weights.0", 0.2),
        ("weights.1", 0.4),
        ("weights.2", 0.8),
        ("weights.3", 1.6),
    ]

    group_of = {}
    for group in made.groups():
        for parameter in group.options["params"]:
            group_of[made.names[parameter]] = group.name
    assert group_of["pos_embed"] == "weights.0"
    assert group_of["patch_embed.bias"] == "no_decay.0"
    assert group_of["blocks.1.attn.qkv.weight"] == "weights.2"
    assert group_of["norm.bias"] == "no_decay.3"
    assert group_of["head.weight"] == "weights.3"


def test_layers_of_a_timm_model_are_its_own() -> None:
    timm = pytest.importorskip("timm")
    model = timm.create_model("resnet10t", pretrained=False, num_classes=3)
    rule = {"match": ".*", "layer_decay": 0.5, "layers": [r"blocks\.(\d+)", ".*"]}
    made = built(model, {"all": rule}, "AdamW", lr=1.0)

    rates = list(made.learning_rates().values())
    layers = len(rates)

    assert layers > 4
    assert rates == [0.5 ** (layers - 1 - layer) for layer in range(layers)]


def test_overrides_are_absolute_or_a_share_of_the_optimizers() -> None:
    rules = {
        "norm": {"module": "norm", "lr": 0.7, "betas": [0.5, 0.6]},
        "head": {"match": "^4", "lr_scale": 10, "weight_decay_scale": 0.5},
    }
    made = built(network(), rules, "AdamW", weight_decay=0.2)
    norm, head, default = (group.options for group in made.groups())

    assert norm["lr"] == 0.7
    assert norm["betas"] == (0.5, 0.6)
    assert norm["weight_decay"] == 0.2
    assert head["lr"] == 1.0
    assert head["weight_decay"] == 0.1
    assert default["lr"] == 0.1
    assert default["weight_decay"] == 0.2


HEAD = {"match": "^4"}
ALL = {"match": ".*"}
DECAY: dict[str, Any] = {"layer_decay": 0.5}


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        ({"head": {"match": "^heed"}}, "groups.head: matches no parameter; the model has 0.weight"),
        ({"all": ALL, "head": HEAD}, "head: has no parameter left: earlier rules take 4.weight"),
        ({"head": {"lr": 1.0}}, "param_groups.head: selects nothing"),
        ({"head": {"match": "("}}, "head.match: '(' is not a valid regular expression"),
        ({"head": {"match": r"(([\w.]+)+)+!"}}, "could search a name of 60"),
        (
            {"head": {"match": "a", "layer_decay": 0.5, "layers": "(a|a)*b"}},
            "head.layers: '(a|a)*b' could search",
        ),
        ({"head": {"match": 3}}, "head.match: must be a string"),
        ({"head": {"kind": "biass"}}, "did you mean bias?"),
        ({"head": {"module": "nrom"}}, "did you mean norm?"),
        ({"head": {"module": "torch.nn.Linaer"}}, "did you mean Linear?"),
        ({"head": {"module": "os.system"}}, "is not allowed"),
        ({"head": {"module": "torch.nn.functional.relu"}}, "neither the import path of a class"),
        ({"head": HEAD | {"except": {"mach": "a"}}}, "did you mean match?"),
        ({"head": HEAD | {"except": {"except": {}}}}, "except.except: unknown key"),
        ({"head": 3}, "param_groups.head: must be a rule"),
        ({"default": HEAD}, "is not 'default'"),
        ({"a b": HEAD}, "a rule's name has letters"),
        ([HEAD], "must be a dict of rules"),
        ({"head": HEAD | {"frozen": 1}}, "head.frozen: must be"),
        ({"head": HEAD | DECAY}, "both layer_decay and layers"),
        ({"head": HEAD | {"layer_decay": 1.5, "layers": ["a"]}}, "must be a number in (0, 1]"),
        ({"head": HEAD | DECAY | {"layers": ["^3"]}}, "head.layers: no pattern matches 4.weight"),
        ({"all": ALL | DECAY | {"layers": ["block", ".*"]}}, "all.layers: finds one layer only"),
        ({"a.0": HEAD}, "a rule's name has letters"),
        ({"head": HEAD | {"lrr": 0.1}}, "head.lrr: the optimizer has no"),
        ({"head": HEAD | {"momentun": 0.1}}, "did you mean momentum?"),
        ({"head": HEAD | {"lr": -1}}, "head.lr: must be 0 or more"),
        ({"head": HEAD | {"lr": "a"}}, "head.lr: must be a number"),
        ({"head": HEAD | {"lr": float("nan")}}, "head.lr: must be a number"),
        ({"head": HEAD | {"lr": True}}, "head.lr: must be a number"),
        ({"head": HEAD | {"nesterov": 1}}, "head.nesterov: must be true"),
        ({"head": HEAD | {"lr": 1.0, "lr_scale": 2}}, "remove one of the two"),
        ({"head": HEAD | {"nesterov_scale": 2}}, "no hyper-parameter"),
        ({"all": ALL | {"frozen": True}}, "optimizer: has no trainable parameter left"),
        ({"a": {"match": "("}, "b": {"kind": "biass"}, "c": {}}, "3 mistakes"),
    ],
)
def test_a_rule_that_makes_no_sense_is_refused(rules: Any, message: str) -> None:
    model = network()

    with pytest.raises(ConfigError) as caught:
        built(model, rules)
    assert message in str(caught.value)
    assert caught.value.exit_code == 2
    for parameter in model.parameters():
        assert parameter.requires_grad  # nothing was touched
