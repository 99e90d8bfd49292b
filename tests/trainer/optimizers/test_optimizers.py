"""Each shipped optimizer against plain PyTorch, several at once, and plain optimizers wrapped."""

import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from regimen.conf.errors import ConfigError
from regimen.trainer.optimizers.optimizers import Optimizers, build_optimizers
from regimen.trainer.optimizers.state import needs_closure
from toys import section

CONF = Path(__file__).resolve().parents[3] / "conf" / "optimizer"


class Small(nn.Module):
    """A network whose layers are called like a transformer's."""

    def __init__(self) -> None:
        super().__init__()
        self.patch_embed = nn.Linear(3, 4)
        first = nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 4))
        second = nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 4))
        self.blocks = nn.Sequential(first, second)
        self.head = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        embedded = torch.tanh(self.patch_embed(x))
        hidden = self.blocks(embedded)
        return torch.as_tensor(self.head(hidden))


def network() -> Small:
    torch.manual_seed(0)
    return Small().double()


def train(model: nn.Module, optimizers: list[Optimizer], updates: int = 4) -> list[Tensor]:
    """Update `model` with every optimizer; return its parameters."""
    generator = torch.Generator().manual_seed(1)
    for _ in range(updates):
        x, y = torch.randn(2, 8, 3, generator=generator, dtype=torch.float64)

        def closure(x: Tensor = x, y: Tensor = y[:, :2]) -> float:
            for optimizer in optimizers:
                optimizer.zero_grad()
            loss = (model(x) - y).square().mean()
            loss.backward()
            return float(loss.detach())

        closure()
        for optimizer in optimizers:
            is_lbfgs = isinstance(optimizer, torch.optim.LBFGS)
            assert needs_closure(type(optimizer)) is is_lbfgs
            if is_lbfgs:
                optimizer.step(closure)
            else:
                optimizer.step()
    return [p.detach() for p in model.parameters()]


def largest_difference(ours: list[Tensor], theirs: list[Tensor]) -> float:
    differences = [(a - b).abs().max() for a, b in zip(ours, theirs, strict=True)]
    return max(differences).item()


def muon_and_adamw(model: nn.Module) -> list[Optimizer]:
    hidden = ("blocks.0.1.weight", "blocks.1.1.weight")
    first = [p for n, p in model.named_parameters() if n in hidden]
    rest = [p for n, p in model.named_parameters() if n not in hidden]
    return [
        torch.optim.Muon(first, lr=5e-3, weight_decay=0.05, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(rest, lr=5e-3, betas=(0.9, 0.95), weight_decay=0.05),
    ]


def by_decay(make: Callable[..., Optimizer], decays: Callable[[str], bool], share: float) -> Any:
    """Return a function that makes an optimizer of `Small` with two groups."""

    def made(parameters: Any) -> Optimizer:
        names = [name for name, _ in network().named_parameters()]
        decayed = []
        others = []
        for name, parameter in zip(names, parameters, strict=True):
            if decays(name):
                decayed.append(parameter)
            else:
                others.append(parameter)
        groups = [
            {"params": decayed, "weight_decay": share},
            {"params": others, "weight_decay": 0.0},
        ]
        return make(groups)

    return made


def is_weight(name: str) -> bool:
    return not is_bias_or_norm(name)


def lamb(parameters: Any) -> Optimizer:
    optim = pytest.importorskip("timm.optim")
    make = by_decay(partial(optim.Lamb, lr=8e-3), is_weight, 0.02)
    made: Optimizer = make(parameters)
    return made


node = partial(section, "optimizer")
NORM_BIASES = ("blocks.0.0.bias", "blocks.1.0.bias")
SGD = partial(torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=5e-4)
# What each file says, written out by hand.
BY_HAND: dict[str, Any] = {
    "adafactor": partial(torch.optim.Adafactor, lr=0.01),
    "adagrad": partial(torch.optim.Adagrad, lr=0.01),
    "adam": partial(torch.optim.Adam, lr=1e-3),
    "adamw": partial(torch.optim.AdamW, lr=1e-3, weight_decay=0.05),
    "adamw_finetune": partial(torch.optim.AdamW, lr=2e-4, weight_decay=0.0),
    "convnext_t": by_decay(partial(torch.optim.AdamW, lr=4e-3), is_weight, 0.05),
    # By name: the norms of `Small` are not called so.
    "deit_s": by_decay(partial(torch.optim.AdamW, lr=5e-4), lambda n: "bias" not in n, 0.05),
    "gpt2": by_decay(partial(torch.optim.AdamW, lr=6e-4, betas=(0.9, 0.95)), is_weight, 0.1),
    "lamb": lamb,
    "lbfgs": partial(torch.optim.LBFGS, history_size=10, line_search_fn="strong_wolfe"),
    "nadam": partial(torch.optim.NAdam, lr=2e-3),
    "radam": partial(torch.optim.RAdam, lr=1e-3),
    "resnet50_v2": by_decay(
        partial(torch.optim.SGD, lr=0.5, momentum=0.9),
        lambda n: n not in ("blocks.0.0.weight", "blocks.1.0.weight", *NORM_BIASES),
        2e-5,
    ),
    "rmsprop": partial(torch.optim.RMSprop, lr=1e-3, momentum=0.9),
    "sgd": SGD,
    "sgd_nesterov": partial(SGD, nesterov=True),
    "vit_s16": by_decay(partial(torch.optim.AdamW, lr=1e-3), is_weight, 0.1),
}


@pytest.mark.parametrize("name", [*BY_HAND, "muon"])
def test_a_shipped_optimizer_does_what_plain_torch_does(name: str) -> None:
    model = network()
    other = network()
    begin = [p.detach().clone() for p in model.parameters()]
    optimizers = build_optimizers(model, node(f"optimizer={name}"), batch_size=512)
    if name == "muon":
        by_hand = muon_and_adamw(other)
    else:
        by_hand = [BY_HAND[name](other.parameters())]

    ours = train(model, list(optimizers.optimizers.values()))
    theirs = train(other, by_hand)

    assert largest_difference(ours, theirs) < 1e-12
    assert largest_difference(ours, begin) > 1e-4


def is_bias_or_norm(name: str) -> bool:
    return name.endswith("bias") or name in ("blocks.0.0.weight", "blocks.1.0.weight")


def layer_of(name: str) -> int:
    beginnings = ("patch_embed", "blocks.0", "blocks.1", "head")
    (layer,) = [i for i, beginning in enumerate(beginnings) if name.startswith(beginning)]
    return layer


class Rates(NamedTuple):
    """What a parameter is trained with."""

    lr: float = 1e-3
    weight_decay: float = 0.05


def no_decay(name: str) -> Rates:
    return Rates(weight_decay=0.0) if is_bias_or_norm(name) else Rates()


def faster_head(name: str) -> Rates:
    return Rates(lr=1e-2) if name.startswith("head") else Rates()


def layer_decay(name: str) -> Rates:
    lr = 1e-3 * 0.75 ** (3 - layer_of(name))
    return no_decay(name)._replace(lr=lr)


def only_head(name: str) -> Rates | None:
    return Rates() if name.startswith("head") else None


# What a parameter is trained with, by its name, with optimizer=adamw; None: it is frozen.
RULES_BY_HAND: dict[str, Callable[[str], Rates | None]] = {
    "none": lambda name: Rates(),
    "no_decay": no_decay,
    "head": faster_head,
    "layer_decay": layer_decay,
    "frozen": only_head,
}


def test_every_file_is_written_out_by_hand_here() -> None:
    files = {path.relative_to(CONF).as_posix() for path in CONF.rglob("*.yaml")}
    rules = [f"param_groups/{name}" for name in RULES_BY_HAND]
    shipped = [*BY_HAND, "muon", "gan", "several", *rules]
    assert files == {f"{name}.yaml" for name in shipped}


def groups_by_hand(model: nn.Module, rates_of: Callable[[str], Rates | None]) -> list[Any]:
    """Return a group for each parameter that is trained."""
    groups = []
    for name, parameter in model.named_parameters():
        rates = rates_of(name)
        if rates is not None:
            groups.append({"params": [parameter], **rates._asdict()})
    return groups


@pytest.mark.parametrize("name", list(RULES_BY_HAND))
def test_shipped_rules_do_what_groups_written_out_do(name: str) -> None:
    model = network()
    other = network()
    chosen = node("optimizer=adamw", f"optimizer/param_groups={name}")
    optimizers = build_optimizers(model, chosen)
    by_hand = torch.optim.AdamW(groups_by_hand(other, RULES_BY_HAND[name]))

    ours = train(model, list(optimizers.optimizers.values()))
    theirs = train(other, [by_hand])

    assert largest_difference(ours, theirs) < 1e-12

    is_one_group = len(optimizers.groups()) == 1 and not optimizers.frozen
    assert is_one_group == (name == "none")


def test_rules_can_be_combined() -> None:
    chosen = node("optimizer=sgd", "optimizer/param_groups=[no_decay,head]")
    table = build_optimizers(network(), chosen).table()
    groups = [row[:2] for row in table]
    assert groups == [("no_decay", "SGD"), ("head", "SGD"), ("default", "SGD")]


def test_shared_rules_hold_within_each_optimizer() -> None:
    chosen = node("optimizer=muon", "optimizer/param_groups=no_decay", "optimizer.lr=0.5")
    table = build_optimizers(network(), chosen).table()
    assert table == [
        ("muon", "muon (Muon)", 2, 32, 0.5, 0.05),
        ("adamw.no_decay", "adamw (AdamW)", 8, 30, 0.5, 0.0),
        ("adamw", "adamw (AdamW)", 2, 20, 0.5, 0.05),
    ]


def test_kernels_go_to_muon_or_by_key_to_the_other_optimizer() -> None:
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten(), nn.Linear(8, 3))
    both = build_optimizers(model, node("optimizer=muon"))
    assert [row.tensors for row in both.table()] == [2, 2]

    key = "optimizer.optimizers.muon.params.kind=matrix"
    matrices = build_optimizers(model, node("optimizer=muon", key))
    assert [row.tensors for row in matrices.table()] == [1, 3]


def test_the_two_networks_of_a_gan_have_an_optimizer_each() -> None:
    model = nn.ModuleDict({"generator": nn.Linear(2, 2), "discriminator": nn.Linear(2, 1)})
    optimizers = build_optimizers(model, node("optimizer=gan", "optimizer.lr=0.5"))
    for group in optimizers.groups():
        names = [optimizers.names[parameter] for parameter in group.options["params"]]
        networks = {name.partition(".")[0] for name in names}
        assert networks == {group.name}
        assert len(names) == 2
        assert group.options["lr"] == 0.5
        assert group.options["betas"][0] == 0.5


def test_several_optimizers_take_parameters_by_their_rules_and_the_last_the_rest() -> None:
    rules = {"norm": {"module": "norm"}, "head": {"match": "^head"}}
    slow = {"_target_": "torch.optim.SGD", "lr": 0.1, "param_groups": rules}
    fast = {"_target_": "torch.optim.Adam", "lr": 0.2, "param_groups": None}
    optimizers = build_optimizers(network(), {"optimizers": {"slow": slow, "fast": fast}})
    sizes = [(g.name, len(g.options["params"])) for g in optimizers.groups()]

    assert sizes == [("slow.norm", 4), ("slow.head", 2), ("fast", 6)]
    assert optimizers.learning_rates() == {"slow.norm": 0.1, "slow.head": 0.1, "fast": 0.2}


@pytest.mark.parametrize(("samples", "batch", "factor"), [(512, 1024, 2.0), (256, 32, 0.125)])
def test_rates_are_scaled_to_the_samples_of_an_update(
    samples: int, batch: int, factor: float
) -> None:
    rules = {
        "head": {"match": "^head", "lr": 0.3},
        "norm": {"kind": "norm", "lr_scale": 10},
        "none": {"kind": "bias", "weight_decay": 0.0},
    }
    chosen = {"_target_": "torch.optim.AdamW", "lr": 0.1, "param_groups": rules}
    plain = build_optimizers(network(), chosen).learning_rates()

    assert plain == {"head": 0.3, "norm": 1.0, "none": 0.1, "default": 0.1}

    chosen["lr_per_samples"] = samples
    scaled = build_optimizers(network(), chosen, batch_size=batch)
    rates = scaled.learning_rates()
    expected = {name: rate * factor for name, rate in plain.items()}

    assert rates == pytest.approx(expected, rel=1e-12)
    assert {row.group: row.lr for row in scaled.table()} == rates


def test_the_default_rate_of_an_optimizer_is_scaled_too() -> None:
    chosen = {"_target_": "torch.optim.Adam", "lr_per_samples": 512}
    optimizers = build_optimizers(network(), chosen, batch_size=1024)
    assert optimizers.learning_rates() == pytest.approx({"default": 1e-3 * 2})


def test_one_of_several_optimizers_may_have_its_rate_as_it_is() -> None:
    slow = {
        "_target_": "torch.optim.SGD",
        "lr": 0.1,
        "params": {"match": "^head"},
    }
    fast = {"_target_": "torch.optim.Adam", "lr": 0.2, "lr_per_samples": None}
    several = {"lr_per_samples": 512, "optimizers": {"slow": slow, "fast": fast}}
    optimizers = build_optimizers(network(), several, batch_size=1024)

    assert optimizers.learning_rates() == pytest.approx({"slow": 0.1 * 2, "fast": 0.2})


@pytest.mark.parametrize(
    ("samples", "batch", "message"),
    [
        (0, 8, "optimizer.lr_per_samples: must be a number of samples, an integer >= 1, not 0"),
        (1.5, 8, "optimizer.lr_per_samples: must be a number of samples"),
        (512, None, "optimizer.lr_per_samples: the number of samples of an update is not known"),
    ],
)
def test_a_rate_that_cannot_be_scaled_is_refused(
    samples: Any, batch: int | None, message: str
) -> None:
    chosen = {"_target_": "torch.optim.SGD", "lr": 0.1, "lr_per_samples": samples}
    with pytest.raises(ConfigError, match=re.escape(message)):
        build_optimizers(network(), chosen, batch_size=batch)


PLAIN: dict[str, Any] = {"_target_": "torch.optim.SGD"}
HEAD = PLAIN | {"params": {"match": "^head"}}
BLOCKS = PLAIN | {"params": {"match": "^blocks"}}
NORM = {"norm": {"module": "norm"}}


def both(*nodes: Any) -> dict[str, Any]:
    return {"optimizers": dict(zip("ab", nodes, strict=False))}


@pytest.mark.parametrize(
    ("chosen", "message"),
    [
        ({"lr": 0.1}, "optimizer: has no _target_"),
        (PLAIN | {"lr": "abc"}, "optimizer.lr: expected float"),
        (PLAIN | {"lr": -1}, "Invalid learning rate: -1"),
        (PLAIN | {"lrr": 1}, "lrr"),
        ({"_target_": "torch.nn.ReLU"}, "ReLU"),
        ({"_target_": "torch.optim.Muon"}, "Muon only supports 2D parameters"),
        ({"_target_": "torch.optim.LBFGS", "param_groups": NORM}, "parameter groups"),
        ({"optimizers": 3}, "must be a dict of optimizers"),
        (both(3), "optimizers.a: must be a node"),
        (both(HEAD, BLOCKS), "no optimizer takes patch_embed.weight, patch_embed.bias"),
        (both(PLAIN, PLAIN), "optimizer.optimizers.b: has no trainable parameter left"),
        (both(PLAIN | {"params": {"kind": "matrixx"}}), "optimizers.a.params.kind: 'matrixx'"),
    ],
)
def test_an_optimizer_that_cannot_be_built_is_refused(chosen: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)) as caught:
        build_optimizers(network(), chosen)
    assert getattr(caught.value, "exit_code", None) == 2


def test_a_plain_optimizer_is_wrapped_as_it_is() -> None:
    model = network()
    plain = torch.optim.SGD(model.parameters(), lr=0.1)
    wrapped = Optimizers.wrap(plain, model)

    assert list(wrapped.items()) == [("optimizer", plain)]
    assert wrapped.learning_rates() == {"default": 0.1}
    assert list(wrapped.parameters()) == list(model.parameters())
    assert Optimizers.wrap(wrapped, model) is wrapped


def test_groups_of_plain_optimizers_get_names() -> None:
    model = network()
    head = {"params": list(model.head.parameters()), "name": "head"}
    rest = [p for name, p in model.named_parameters() if not name.startswith("head")]
    named = torch.optim.SGD([head], lr=0.1)
    unnamed = torch.optim.SGD(rest, lr=0.2)
    wrapped = Optimizers.wrap({"a": named, "b": unnamed}, model)

    assert wrapped.learning_rates() == {"head": 0.1, "b": 0.2}


def test_groups_without_names_are_numbered() -> None:
    model = network()
    groups = [{"params": [p]} for p in model.parameters()]
    plain = torch.optim.SGD(groups, lr=0.1)
    wrapped = Optimizers.wrap(plain, model)
    names = list(wrapped.learning_rates())

    assert names == [f"group_{i}" for i in range(12)]


def test_what_is_frozen_may_be_left_out_of_a_plain_optimizer() -> None:
    model = network()
    model.blocks.requires_grad_(False)
    trained = [p for p in model.parameters() if p.requires_grad]
    wrapped = Optimizers.wrap(torch.optim.SGD(trained, lr=0.1), model)
    last = wrapped.table()[-1]

    assert last[:3] == ("frozen", "-", 8)


def test_wrapping_refuses_parameters_that_are_left_out_foreign_or_double() -> None:
    model = network()
    of_the_head = torch.optim.SGD(model.head.parameters(), lr=0.1)
    with pytest.raises(ConfigError, match=r"no optimizer has patch_embed.weight.*\(\+2 more\)"):
        Optimizers.wrap(of_the_head, model)

    foreign = nn.Parameter(torch.zeros(1))
    with_foreign = torch.optim.SGD([*model.parameters(), foreign], lr=0.1)
    with pytest.raises(ConfigError, match="not in the model"):
        Optimizers.wrap(with_foreign, model)

    double = {name: torch.optim.SGD(model.parameters(), lr=0.1) for name in ("a", "b")}
    with pytest.raises(ConfigError, match=r"two groups have patch_embed.weight"):
        Optimizers.wrap(double, model)


def test_the_rates_of_an_update_stay_when_a_tensor_changes() -> None:
    rate = torch.tensor(0.5)
    optimizer = torch.optim.AdamW([nn.Parameter(torch.zeros(1))], lr=rate)
    optimizers = Optimizers({"a": optimizer}, {})
    optimizers.record_rates()
    optimizer.param_groups[0]["lr"].fill_(0.25)

    assert optimizers.learning_rates(used=True) == {"default": 0.5}
    assert optimizers.learning_rates() == {"default": 0.25}
