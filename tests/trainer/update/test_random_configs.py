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

SAMPLES = 19
FEATURES = 6
CLASSES = 3
BATCH = 8
UPDATES = 5


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
    """Draw a class, and a value for each of its arguments."""
    name = draw(st.sampled_from(sorted(choices)))
    node = {"_target_": f"{prefix}.{name}"}
    for argument, values in choices[name].items():
        node[argument] = draw(st.sampled_from(values))
    return node


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
    optimizer = draw(targets(OPTIMIZERS, "torch.optim"))
    optimizer["lr"] = draw(st.sampled_from([0.01, 0.1]))
    optimizer["param_groups"] = draw(RULES)
    norm = draw(st.none() | st.sampled_from([0.05, 1.0]))
    trainer = {
        "max_epochs": None,
        "max_steps": UPDATES,
        "precision": "fp64",
        "gradient_accumulation_steps": draw(st.integers(1, 4)),
        "clip_grad_norm": norm,
        "clip_grad_norm_type": draw(st.sampled_from([1.0, 2.0, float("inf")])),
        "clip_grad_per_group": norm is not None and draw(st.booleans()),
        "clip_grad_value": draw(st.none() | st.just(0.01)),
        "gradient_noise": draw(st.none() | st.just({"eta": 0.1, "gamma": 0.5})),
    }
    task = {
        "_target_": "regimen.trainer.tasks.classification.Classification",
        "num_classes": CLASSES,
        "loss": {
            "_target_": "torch.nn.CrossEntropyLoss",
            "label_smoothing": draw(st.sampled_from([0.0, 0.1])),
        },
    }
    train = {"_target_": "toys.points", "samples": SAMPLES, "features": FEATURES}
    config = {
        "name": "random",
        "seed": draw(st.integers(0, 3)),
        "model": MODELS[draw(st.sampled_from(sorted(MODELS)))],
        "data": {"num_classes": CLASSES, "train": train},
        "loader": {"batch_size": BATCH, "drop_last": draw(st.booleans())},
        "task": task,
        "optimizer": optimizer,
        "lr_scheduler": draw(st.none() | targets(SCHEDULERS, "torch.optim.lr_scheduler")),
        "trainer": trainer,
    }
    return with_defaults(config)


def accepts(rule: dict, name: str) -> bool:
    """Whether a rule takes the parameter of a name."""
    kind = rule.get("kind")
    if kind is not None:
        return name.endswith(kind)  # bias, weight
    return re.search(rule["match"], name) is not None


def groups_by_hand(model: nn.Module, options: dict) -> list[dict]:
    """Divide parameters by the rules, as one would in a script."""
    rules = options["param_groups"]
    members = {name: [] for name in [*rules, "default"]}
    for name, parameter in model.named_parameters():
        accepting = [rule for rule, node in rules.items() if accepts(node, name)]
        first = [*accepting, "default"][0]
        members[first].append(parameter)

    groups = []
    for rule, parameters in members.items():
        node = rules.get(rule, {})
        group = {"params": parameters, "lr": options["lr"] * node.get("lr_scale", 1.0)}
        if "lr" in node:
            group["lr"] = node["lr"]
        if "weight_decay" in node:
            group["weight_decay"] = node["weight_decay"]
        if parameters:
            groups.append(group)
    return groups


def class_of(node: dict, module) -> type:
    """Return the class that a node names by its path."""
    return getattr(module, node["_target_"].rpartition(".")[2])


def by_hand(config: dict, model: nn.Module) -> None:
    """Train on whole batches with torch alone."""
    trainer = config["trainer"]
    seed = config["seed"]
    data = toys.points(SAMPLES, FEATURES)
    loss_of = nn.CrossEntropyLoss(label_smoothing=config["task"]["loss"]["label_smoothing"])
    optimizer = optimizer_by_hand(config["optimizer"], model)
    scheduler = scheduler_by_hand(config["lr_scheduler"], optimizer)
    batches = batches_by_hand(seed, config["loader"]["drop_last"])
    for update, batch in enumerate(batches):
        optimizer.zero_grad()
        loss = loss_of(model(data.x[batch]), data.y[batch])
        loss.backward()
        clip_by_hand(optimizer, trainer)
        if trainer["gradient_noise"] is not None:
            noise_by_hand(parameters_of(optimizer), seed, update)
        optimizer.step()
        if scheduler is not None:
            scheduler.step()


def optimizer_by_hand(node: dict, model: nn.Module) -> torch.optim.Optimizer:
    options = {k: v for k, v in node.items() if k not in ("_target_", "param_groups")}
    kind = class_of(node, torch.optim)
    return kind(groups_by_hand(model, node), **options)


def parameters_of(optimizer: torch.optim.Optimizer) -> list[nn.Parameter]:
    """Return the parameters in the order of the groups."""
    found = []
    for group in optimizer.param_groups:
        found += group["params"]
    return found


def clip_by_hand(optimizer: torch.optim.Optimizer, trainer: dict) -> None:
    bound = trainer["clip_grad_norm"]
    norm_type = trainer["clip_grad_norm_type"]
    parameters = parameters_of(optimizer)
    if bound is not None and trainer["clip_grad_per_group"]:
        for group in optimizer.param_groups:
            nn.utils.clip_grad_norm_(group["params"], bound, norm_type)
    elif bound is not None:
        nn.utils.clip_grad_norm_(parameters, bound, norm_type)
    if trainer["clip_grad_value"] is not None:
        nn.utils.clip_grad_value_(parameters, trainer["clip_grad_value"])


def noise_by_hand(parameters: list[nn.Parameter], seed: int, update: int) -> None:
    generator = torch.Generator().manual_seed(derived_seed(seed, "gradient noise", update, ""))
    variance = 0.1 / (1 + update) ** 0.5
    for parameter in parameters:
        noise = torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
        parameter.grad += variance**0.5 * noise


def scheduler_by_hand(node: dict | None, optimizer):
    if node is None:
        return None
    options = {}
    for name, value in node.items():
        if name not in ("_target_", "interval"):
            options[name] = UPDATES if value == "${total_steps}" else value
    kind = class_of(node, torch.optim.lr_scheduler)
    return kind(optimizer, **options)


def batches_by_hand(seed: int, drop_last: bool) -> list[Tensor]:
    order = Shuffled(SAMPLES, seed)
    chosen = []
    for epoch in range(UPDATES):
        samples = torch.as_tensor(order(epoch)[:SAMPLES])
        for batch in samples.split(BATCH):
            if len(batch) == BATCH or not drop_last:
                chosen.append(batch)
    return chosen[:UPDATES]


def copied(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


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
    start = copied(model)
    trainer.fit()
    ours = copied(model)

    model.load_state_dict(start)
    by_hand(config, model)

    for name, value in model.state_dict().items():
        torch.testing.assert_close(ours[name], value, rtol=0, atol=1e-10, msg=name)

    moved = [name for name in ours if not torch.equal(ours[name], start[name])]
    assert moved != []


def test_noise_counts_the_updates_that_were_skipped_and_leaves_other_draws_alone() -> None:
    data = toys.batches(4, bad=1)
    model = toys.normed().double()
    trainer = toys.trainer_of(
        Classification(3),
        data,
        model=model,
        momentum=0.0,
        seed=3,
        max_epochs=1,
        on_nonfinite="skip",
        gradient_noise=GradientNoise(eta=0.1, gamma=0.5),
    )
    torch.manual_seed(0)
    trainer.fit()
    drawn = torch.rand(3)
    torch.manual_seed(0)

    assert trainer.state.skipped_updates == 1
    assert torch.equal(torch.rand(3), drawn)

    plain = toys.normed().double()
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    for update in (0, 2, 3):  # 1 was skipped
        x, y = data[update]
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(plain(x.double()), y)
        loss.backward()
        noise_by_hand([*plain.parameters()], 3, update)
        optimizer.step()

    toys.assert_equal(model, plain)


def test_each_update_and_each_turn_has_its_own_noise() -> None:
    options = TrainerOptions(gradient_noise=GradientNoise(eta=0.5, gamma=0.0))

    def drawn(update: int, turn: str) -> Tensor:
        parameter = nn.Parameter(torch.zeros(40_000))
        unused = nn.Parameter(torch.zeros(3))
        parameter.grad = torch.zeros_like(parameter)
        add_noise(options, [parameter, unused], update, turn)
        assert unused.grad is None
        return parameter.grad

    draws = torch.stack([drawn(0, ""), drawn(1, ""), drawn(0, "a")])
    correlations = torch.corrcoef(draws)

    assert (correlations - torch.eye(3)).abs().max() < 0.03
