"""Random valid configurations train as the plain loop that is written from them (float64)."""

import re
from pathlib import Path

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import toys
from regimen.conf.check import parse, with_defaults
from regimen.data.orders import Shuffled
from regimen.trainer.assembly.check import check_targets
from regimen.trainer.assembly.experiment import build
from regimen.trainer.options import GradientNoise, TrainerOptions
from regimen.trainer.rng import derived_seed
from regimen.trainer.strategies.strategy import Strategy
from regimen.trainer.tasks.classification import Classification
from regimen.trainer.update.gradients import add_noise

SAMPLES, FEATURES, CLASSES, BATCH, UPDATES = 19, 6, 3, 8, 5


MODELS = {
    "linear": {"_target_": "torch.nn.Linear", "in_features": FEATURES, "out_features": CLASSES},
    "sequential": {
        "_target_": "regimen.models.sequential.from_layers",
        "input_shape": [FEATURES],
        "layers": [
            {"_target_": "torch.nn.Linear", "in_features": FEATURES, "out_features": 5},
            {"_target_": "torch.nn.LayerNorm", "normalized_shape": 5},
            {"_target_": "torch.nn.Tanh"},
            {"_target_": "torch.nn.Linear", "in_features": 5, "out_features": CLASSES},
        ],
    },
}
OPTIMIZERS = {
    "SGD": {"momentum": [0.0, 0.9], "weight_decay": [0.0, 0.1]},
    "AdamW": {"weight_decay": [0.0, 0.3], "amsgrad": [False, True]},
    "Adam": {"eps": [1e-8, 1e-3]},
    "RMSprop": {"momentum": [0.0, 0.5], "centered": [False, True]},
    "Adagrad": {"lr_decay": [0.0, 0.1]},
    "NAdam": {},
    "RAdam": {},
}
SCHEDULERS = {
    "StepLR": {"step_size": [1, 2], "gamma": [0.5]},
    "CosineAnnealingLR": {"T_max": ["${total_steps}"]},
    "OneCycleLR": {"max_lr": [0.3], "total_steps": ["${total_steps}"], "cycle_momentum": [False]},
    "ExponentialLR": {"gamma": [0.7]},
    "LinearLR": {"total_iters": [3]},
    "PolynomialLR": {"total_iters": ["${total_steps}"], "power": [1.0, 2.0]},
}


@st.composite
def targets(draw, choices: dict, prefix: str) -> dict:
    name = draw(st.sampled_from(sorted(choices)))
    arguments = {k: draw(st.sampled_from(v)) for k, v in choices[name].items()}
    return {"_target_": f"{prefix}.{name}", **arguments}


RULES = st.sampled_from(
    [
        {},
        {"bias": {"kind": "bias", "weight_decay": 0.05}},
        {"bias": {"kind": "bias", "lr_scale": 0.1}},
        {"weights": {"kind": "weight", "lr": 0.02}},
        {"first": {"match": "weight", "lr_scale": 2.0}, "rest": {"match": "bias", "lr": 0.01}},
    ]
)


@st.composite
def configs(draw) -> dict:
    optimizer = draw(targets(OPTIMIZERS, "torch.optim")) | {
        "lr": draw(st.sampled_from([0.01, 0.1])),
        "param_groups": draw(RULES),
    }
    scheduler = draw(st.none() | targets(SCHEDULERS, "torch.optim.lr_scheduler"))
    steps = draw(st.integers(1, 4))
    norm = draw(st.none() | st.sampled_from([0.05, 1.0]))
    trainer = {
        "max_epochs": None,
        "max_steps": UPDATES,
        "precision": "fp64",
        "gradient_accumulation_steps": steps,
        "clip_grad_norm": norm,
        "clip_grad_norm_type": draw(st.sampled_from([1.0, 2.0, float("inf")])),
        "clip_grad_per_group": norm is not None and draw(st.booleans()),
        "clip_grad_value": draw(st.none() | st.just(0.01)),
        "gradient_noise": draw(st.none() | st.just({"eta": 0.1, "gamma": 0.5})),
    }
    node = {"_target_": "toys.points", "samples": SAMPLES, "features": FEATURES}
    return with_defaults(
        {
            "name": "random",
            "seed": draw(st.integers(0, 3)),
            "model": MODELS[draw(st.sampled_from(sorted(MODELS)))],
            "data": {"num_classes": CLASSES, "train": node},
            "loader": {"batch_size": BATCH, "drop_last": draw(st.booleans())},
            "task": {
                "_target_": "regimen.trainer.tasks.classification.Classification",
                "num_classes": CLASSES,
                "loss": {
                    "_target_": "torch.nn.CrossEntropyLoss",
                    "label_smoothing": draw(st.sampled_from([0.0, 0.1])),
                },
            },
            "optimizer": optimizer,
            "lr_scheduler": scheduler,
            "trainer": trainer,
        }
    )


def groups_by_hand(model: nn.Module, options: dict) -> list[dict]:
    """Divide parameters by the rules, as one would in a script."""
    rules = options["param_groups"]
    groups = {name: [] for name in [*rules, "default"]}
    for name, parameter in model.named_parameters():
        matching = (
            rule
            for rule, node in rules.items()
            if (node.get("kind") == "bias" and name.endswith("bias"))
            or (node.get("kind") == "weight" and name.endswith("weight"))
            or ("match" in node and re.search(node["match"], name))
        )
        groups[next(matching, "default")].append(parameter)
    result = []
    for rule, parameters in groups.items():
        node = rules.get(rule, {})
        values = {k: v for k, v in node.items() if k in ("lr", "weight_decay")}
        values.setdefault("lr", options["lr"] * node.get("lr_scale", 1.0))
        result += [{"params": parameters, **values}] if parameters else []
    return result


def by_hand(config: dict, model: nn.Module) -> None:
    """Train on whole batches with torch alone."""
    trainer, loader = config["trainer"], config["loader"]
    data = toys.points(SAMPLES, FEATURES)
    node = config["optimizer"]
    kind = getattr(torch.optim, node["_target_"].rpartition(".")[2])
    own = {k: v for k, v in node.items() if k not in ("_target_", "param_groups")}
    optimizer = kind(groups_by_hand(model, node), **own)
    scheduler = scheduler_by_hand(config["lr_scheduler"], optimizer)
    loss = nn.CrossEntropyLoss(label_smoothing=config["task"]["loss"]["label_smoothing"])
    for update, batch in enumerate(batches_by_hand(config["seed"], loader["drop_last"])):
        optimizer.zero_grad()
        loss(model(data.x[batch]), data.y[batch]).backward()
        if trainer["clip_grad_norm"] is not None:
            per_group = trainer["clip_grad_per_group"]
            members = [g["params"] for g in optimizer.param_groups]
            bound, norm_type = trainer["clip_grad_norm"], trainer["clip_grad_norm_type"]
            for parameters in members if per_group else [list(model.parameters())]:
                nn.utils.clip_grad_norm_(parameters, bound, norm_type)
        if trainer["clip_grad_value"] is not None:
            nn.utils.clip_grad_value_(model.parameters(), trainer["clip_grad_value"])
        if trainer["gradient_noise"] is not None:
            members = [p for g in optimizer.param_groups for p in g["params"]]
            noise_by_hand(members, config["seed"], update)
        optimizer.step()
        if scheduler is not None:
            scheduler.step()


def noise_by_hand(parameters: list[nn.Parameter], seed: int, update: int) -> None:
    generator = torch.Generator().manual_seed(derived_seed(seed, "gradient noise", update, ""))
    for parameter in parameters:
        noise = torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
        parameter.grad += (0.1 / (1 + update) ** 0.5) ** 0.5 * noise


def scheduler_by_hand(node: dict | None, optimizer):
    if node is None:
        return None
    kind = getattr(torch.optim.lr_scheduler, node["_target_"].rpartition(".")[2])
    own = {k: UPDATES if v == "${total_steps}" else v for k, v in node.items() if k != "_target_"}
    own.pop("interval", None)
    return kind(optimizer, **own)


def batches_by_hand(seed: int, drop_last: bool) -> list[Tensor]:
    order, chosen = Shuffled(SAMPLES, seed), []
    for epoch in range(UPDATES):
        cut = torch.as_tensor(order(epoch)[:SAMPLES]).split(BATCH)
        chosen += [c for c in cut if len(c) == BATCH or not drop_last]
    return chosen[:UPDATES]


@settings(
    max_examples=60,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
    derandomize=True,
)
@given(config=configs())
def test_updates_are_those_of_the_plain_loop(monkeypatch, config: dict) -> None:
    monkeypatch.chdir(Path(toys.__file__).parent)  # it names the data set as the user's own
    parsed = parse(config)
    check_targets(parsed)
    trainer = build(parsed, Strategy("cpu")).trainer
    model = trainer.model
    start = {k: v.clone() for k, v in model.state_dict().items()}
    trainer.fit()
    ours = {k: v.clone() for k, v in model.state_dict().items()}
    model.load_state_dict(start)
    by_hand(config, model)
    for name, value in model.state_dict().items():
        torch.testing.assert_close(ours[name], value, rtol=0, atol=1e-10, msg=name)
    assert any(not torch.equal(ours[name], start[name]) for name in ours)


def test_noise_counts_the_updates_that_were_skipped_and_leaves_other_draws_alone() -> None:
    data = toys.batches(4, bad=1)
    noise = GradientNoise(eta=0.1, gamma=0.5)
    options = {"momentum": 0.0, "seed": 3, "max_epochs": 1, "on_nonfinite": "skip"}
    model, plain = toys.normed().double(), toys.normed().double()
    trainer = toys.trainer_of(Classification(3), data, model=model, gradient_noise=noise, **options)
    torch.manual_seed(0)
    trainer.fit()
    assert trainer.state.skipped_updates == 1
    drawn = torch.rand(3)
    torch.manual_seed(0)
    assert torch.equal(torch.rand(3), drawn)
    for update, (x, y) in enumerate(data):
        if update == 1:
            continue
        plain.zero_grad()
        nn.functional.cross_entropy(plain(x.double()), y).backward()
        noise_by_hand([*plain.parameters()], 3, update)
        torch.optim.SGD(plain.parameters(), lr=0.1).step()
    toys.assert_equal(model, plain)


def test_each_update_and_each_turn_has_its_own_noise() -> None:
    options, drawn = TrainerOptions(gradient_noise=GradientNoise(eta=0.5, gamma=0.0)), []
    for update, turn in ((0, ""), (1, ""), (0, "a")):
        parameter, unused = nn.Parameter(torch.zeros(40_000)), nn.Parameter(torch.zeros(3))
        parameter.grad = torch.zeros_like(parameter)
        add_noise(options, [parameter, unused], update, turn)
        assert unused.grad is None
        drawn.append(parameter.grad)
    assert (torch.corrcoef(torch.stack(drawn)) - torch.eye(3)).abs().max() < 0.03
