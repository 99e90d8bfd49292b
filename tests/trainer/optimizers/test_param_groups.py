"""Rules: who is meant, who comes first, what is refused."""

from typing import Any

import pytest
import torch
from torch import nn

from conf.errors import Problem, raise_problems
from models.vit import ViT
from trainer.optimizers.optimizers import build_optimizers
from trainer.optimizers.param_groups import (
    Claim,
    ParamGroup,
    ParamGroupError,
    candidates,
    divide,
    parse_rules,
)


class Tied(nn.Module):
    """An embedding that is also the head's weight, and a bare parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 4)
        self.scale = nn.Parameter(torch.ones(4))
        self.norm = nn.LayerNorm(4)
        self.head = nn.Linear(4, 5, bias=False)
        self.head.weight = self.embed.weight


def network() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Flatten(), nn.Linear(8, 4), nn.Linear(4, 3)
    )


def groups_of(model: nn.Module, rules: Any) -> dict[str, ParamGroup]:
    problems: list[Problem] = []
    claim = Claim("optimizer.param_groups", parse_rules(rules, "optimizer.param_groups", problems))
    raise_problems(problems, ParamGroupError)
    return {group.name: group for group in divide(model, {"": claim})[0][""]}


def members(model: nn.Module, rules: Any) -> dict[str, list[str]]:
    return {name: list(group.parameters) for name, group in groups_of(model, rules).items()}


@pytest.mark.parametrize(
    ("rule", "expected"),
    [
        pytest.param({"match": "^4"}, ["4.weight", "4.bias"], id="name"),
        pytest.param({"match": ["^4.*bias", "^0.*bias"]}, ["0.bias", "4.bias"], id="names"),
        pytest.param({"module": "norm"}, ["1.weight", "1.bias"], id="norm"),
        pytest.param({"module": "conv"}, ["0.weight", "0.bias"], id="conv"),
        pytest.param(
            {"module": "torch.nn.Linear"},
            ["3.weight", "3.bias", "4.weight", "4.bias"],
            id="class",
        ),
        pytest.param({"kind": "bias"}, ["0.bias", "1.bias", "3.bias", "4.bias"], id="bias"),
        pytest.param(
            {"kind": "vector", "except": {"kind": "bias"}}, ["1.weight"], id="vector-but-bias"
        ),
        pytest.param(
            {"kind": "ndim<=1"}, ["0.bias", "1.weight", "1.bias", "3.bias", "4.bias"], id="ndim"
        ),
        pytest.param({"kind": "matrix"}, ["3.weight", "4.weight"], id="matrix"),
        pytest.param({"kind": "kernel"}, ["0.weight"], id="kernel"),
        pytest.param({"kind": "ndim >= 3"}, ["0.weight"], id="ndim-spaced"),
        pytest.param({"kind": "weight", "match": "^4"}, ["4.weight"], id="both-conditions"),
        pytest.param(
            {"match": ".*", "except": {"module": "norm", "match": "^[34]"}},
            ["0.weight", "0.bias"],
            id="except-any",
        ),
        pytest.param({"except": {"match": "^[034]"}}, ["1.weight", "1.bias"], id="only-except"),
    ],
)
def test_a_rule_means(rule: dict[str, Any], expected: list[str]) -> None:
    model = network()
    groups = members(model, {"chosen": rule})
    names = [name for name, _ in model.named_parameters()]
    assert groups["chosen"] == expected
    assert groups["default"] == [name for name in names if name not in expected]


def test_the_first_rule_that_accepts_a_parameter_wins() -> None:
    rules = {"head": {"match": "^4"}, "biases": {"kind": "bias"}, "linear": {"module": "linear"}}
    groups = members(network(), rules)
    assert groups["head"] == ["4.weight", "4.bias"]
    assert groups["biases"] == ["0.bias", "1.bias", "3.bias"]
    assert groups["linear"] == ["3.weight"]
    assert list(groups) == ["head", "biases", "linear", "default"]


def test_rules_can_be_a_list_and_entries_of_a_dict_be_dropped() -> None:
    listed = members(network(), [{"name": "head", "match": "^4"}, {"kind": "bias"}])
    assert list(listed) == ["head", "rule_1", "default"]
    assert list(members(network(), {"head": {"match": "^4"}, "gone": None})) == ["head", "default"]


def test_every_trainable_parameter_is_in_exactly_one_group() -> None:
    model = Tied()
    groups = members(model, {"norm": {"module": "norm"}, "vectors": {"kind": "vector"}})
    placed = [name for names in groups.values() for name in names]
    assert sorted(placed) == sorted(name for name, _ in model.named_parameters())
    assert groups["vectors"] == ["scale"]


def test_a_tied_weight_counts_once_and_answers_to_both_names() -> None:
    assert members(Tied(), {"head": {"match": "^head"}})["head"] == ["embed.weight"]
    assert members(Tied(), {"tables": {"kind": "embedding"}})["tables"] == ["embed.weight"]
    assert members(Tied(), {"linear": {"module": "linear"}})["linear"] == ["embed.weight"]


def test_frozen_rules_take_parameters_out_and_stop_their_gradients() -> None:
    model = network()
    optimizers = build_optimizers(
        model,
        {
            "_target_": "torch.optim.SGD",
            "lr": 0.1,
            "param_groups": {"body": {"except": {"match": "^4"}, "frozen": True}},
        },
    )
    assert [n for n, p in model.named_parameters() if p.requires_grad] == ["4.weight", "4.bias"]
    assert [name for name, _ in optimizers.named_parameters()] == ["4.weight", "4.bias"]
    assert [row.group for row in optimizers.table()] == ["default", "frozen"]
    assert optimizers.table()[1].tensors == 6


def test_parameters_frozen_before_stay_out_and_their_rules_still_match() -> None:
    model = network()
    model[4].requires_grad_(False)
    groups = members(model, {"head": {"match": "^4"}, "norm": {"module": "norm"}})
    assert list(groups) == ["norm", "default"]


def test_norm_layers_of_other_packages_are_known_by_their_name() -> None:
    class PixelNorm2d(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gain = nn.Parameter(torch.ones(2))

    model = nn.Sequential(nn.Linear(2, 2), PixelNorm2d())
    assert members(model, {"norm": {"kind": "norm"}})["norm"] == ["1.gain"]


def test_biases_of_recurrent_and_attention_layers_are_biases() -> None:
    model = nn.ModuleList([nn.LSTM(2, 2), nn.MultiheadAttention(2, 1)])
    biases = [c.name for c in candidates(model) if c.is_kind("bias")]
    assert biases == [
        "0.bias_ih_l0",
        "0.bias_hh_l0",
        "1.in_proj_bias",
        "1.out_proj.bias",
    ]


def test_learning_rate_decays_layer_by_layer() -> None:
    """Layer d of L learns at lr * decay ** (L - 1 - d), as for BEiT."""
    rules = {
        "no_decay": {"kind": ["bias", "norm"], "weight_decay": 0.0, "layer_decay": 0.5},
        "weights": {"match": ".*", "layer_decay": 0.5, "lr": 1.6},
    }
    for rule in rules.values():
        rule["layers"] = ["embed|token", r"blocks\.(\d+)\.", ".*"]
    model = ViT(num_classes=3, image_size=8, dim=12, depth=2, heads=2)
    node = {"_target_": "torch.optim.AdamW", "lr": 0.8, "param_groups": rules}
    optimizers = build_optimizers(model, node)
    assert {group.name: group.options["lr"] for group in optimizers.groups()} == {
        "no_decay.0": 0.1,
        "no_decay.1": 0.2,
        "no_decay.2": 0.4,
        "no_decay.3": 0.8,
        "weights.0": 0.2,
        "weights.1": 0.4,
        "weights.2": 0.8,
        "weights.3": 1.6,
    }
    of = {optimizers.names[p]: g.name for g in optimizers.groups() for p in g.options["params"]}
    chosen = [
        "pos_embed",
        "patch_embed.bias",
        "blocks.1.attn.qkv.weight",
        "norm.bias",
        "head.weight",
    ]
    assert [of[name] for name in chosen] == [
        "weights.0",
        "no_decay.0",
        "weights.2",
        "no_decay.3",
        "weights.3",
    ]


def test_layers_of_a_timm_model_are_its_own() -> None:
    timm = pytest.importorskip("timm")
    model = timm.create_model("resnet10t", pretrained=False, num_classes=3)
    rule = {"match": ".*", "layer_decay": 0.5, "layers": [r"blocks\.(\d+)", ".*"]}
    node = {"_target_": "torch.optim.AdamW", "lr": 1.0, "param_groups": {"all": rule}}
    optimizers = build_optimizers(model, node)
    rates = [group.options["lr"] for group in optimizers.groups()]
    assert len(rates) > 4
    assert rates == [0.5 ** (len(rates) - 1 - i) for i in range(len(rates))]


def test_overrides_are_absolute_or_a_share_of_the_optimizers() -> None:
    optimizers = build_optimizers(
        network(),
        {
            "_target_": "torch.optim.AdamW",
            "lr": 0.1,
            "weight_decay": 0.2,
            "param_groups": {
                "norm": {"module": "norm", "lr": 0.7, "betas": [0.5, 0.6]},
                "head": {"match": "^4", "lr_scale": 10, "weight_decay_scale": 0.5},
            },
        },
    )
    norm, head, default = (group.options for group in optimizers.groups())
    assert (norm["lr"], norm["betas"], norm["weight_decay"]) == (0.7, (0.5, 0.6), 0.2)
    assert (head["lr"], head["weight_decay"]) == (1.0, 0.1)
    assert (default["lr"], default["weight_decay"]) == (0.1, 0.2)


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        (
            {"head": {"match": "^heed"}},
            "optimizer.param_groups.head: matches no parameter; the model has 0.weight",
        ),
        (
            {"all": {"match": ".*"}, "head": {"match": "^4"}},
            "optimizer.param_groups.head: has no parameter left: earlier rules take 4.weight",
        ),
        ({"head": {"lr": 1.0}}, "param_groups.head: selects nothing"),
        ({"head": {"match": "("}}, "head.match: '(' is not a valid regular expression"),
        ({"head": {"match": 3}}, "head.match: must be a string"),
        ({"head": {"kind": "biass"}}, "did you mean bias?"),
        ({"head": {"module": "nrom"}}, "did you mean norm?"),
        ({"head": {"module": "torch.nn.Linaer"}}, "did you mean Linear?"),
        ({"head": {"module": "os.system"}}, "is not allowed"),
        ({"head": {"module": "torch.nn.functional.relu"}}, "neither the import path of a class"),
        ({"head": {"match": "^4", "except": {"mach": "a"}}}, "did you mean match?"),
        ({"head": {"match": "^4", "except": {"except": {}}}}, "except.except: unknown key"),
        ({"head": 3}, "param_groups.head: must be a rule"),
        ({"default": {"match": "^4"}}, "must not be 'default'"),
        ({"a b": {"match": "^4"}}, "the name of a rule may have"),
        ("head", "must be a dict or a list of rules"),
        (
            [{"name": "a", "match": "^4"}, {"name": "a", "match": "^3"}],
            "the same name to two rules",
        ),
        ({"head": {"match": "^4", "frozen": 1}}, "head.frozen: must be"),
        ({"head": {"match": "^4", "layer_decay": 0.5}}, "both layer_decay and layers"),
        (
            {"head": {"match": "^4", "layer_decay": 1.5, "layers": ["a"]}},
            "layer_decay: must be a number in (0, 1]",
        ),
        (
            {"head": {"match": "^4", "layer_decay": 0.5, "layers": ["^3"]}},
            "head.layers: no pattern matches 4.weight",
        ),
        (
            {"all": {"match": ".*", "layer_decay": 0.5, "layers": ["block", ".*"]}},
            "all.layers: finds one layer only; give patterns from the input on",
        ),
        ({"head": {"match": "^4", "lrr": 0.1}}, "head.lrr: the optimizer has no"),
        ({"head": {"match": "^4", "momentun": 0.1}}, "did you mean momentum?"),
        ({"head": {"match": "^4", "lr": -1}}, "head.lr: must be 0 or more"),
        ({"head": {"match": "^4", "lr": "a"}}, "head.lr: must be a number"),
        ({"head": {"match": "^4", "lr": float("nan")}}, "head.lr: must be a number"),
        ({"head": {"match": "^4", "lr": True}}, "head.lr: must be a number"),
        ({"head": {"match": "^4", "nesterov": 1}}, "head.nesterov: must be true"),
        ({"head": {"match": "^4", "lr": 1.0, "lr_scale": 2}}, "remove one of the two"),
        ({"head": {"match": "^4", "nesterov_scale": 2}}, "no hyper-parameter"),
        ({"all": {"match": ".*", "frozen": True}}, "optimizer: has no trainable parameter left"),
    ],
)
def test_a_rule_that_makes_no_sense_is_refused(rules: Any, message: str) -> None:
    model = network()
    with pytest.raises(ParamGroupError) as caught:
        build_optimizers(model, {"_target_": "torch.optim.SGD", "lr": 0.1, "param_groups": rules})
    assert message in str(caught.value)
    assert caught.value.exit_code == 2
    assert all(p.requires_grad for p in model.parameters())


def test_all_mistakes_are_told_at_once() -> None:
    rules = {"a": {"match": "("}, "b": {"kind": "biass"}, "c": {}}
    with pytest.raises(ParamGroupError, match="3 mistakes") as caught:
        groups_of(network(), rules)
    assert len(str(caught.value).splitlines()) == 4
