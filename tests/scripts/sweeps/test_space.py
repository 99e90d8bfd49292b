"""The space of a search: which keys vary, and between which values."""

from dataclasses import replace
from pathlib import Path

import pytest

from conf.errors import ConfigError
from scripts.cli.arguments import parse_arguments
from scripts.composition.compose import compose, split_search
from scripts.composition.overrides import Dimension
from scripts.sweeps.search import distribution, enqueued, given, samples, values_of, with_integers

PRIMARY = """
defaults: [{model: mlp}, _self_]
name: train
data: {}
task: {_target_: torch.nn.Identity}
optimizer: {lr: 0.1, weight_decay: 0.0}
seed: 3
"""


@pytest.fixture(autouse=True)
def _configs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "conf" / "model").mkdir(parents=True)
    (tmp_path / "conf" / "train.yaml").write_text(PRIMARY)
    linear = "_target_: torch.nn.Linear\nin_features: 4\nout_features: 2\n"
    (tmp_path / "conf" / "model" / "mlp.yaml").write_text(linear)
    (tmp_path / "conf" / "model" / "none.yaml").write_text("_target_: torch.nn.Identity\n")
    monkeypatch.chdir(tmp_path)


def space_of(*texts: str, **params: object) -> list[Dimension]:
    arguments = parse_arguments(["-m", "--config-path", "conf", *texts])
    fixed, varied = split_search(arguments)
    params = {key.replace("__", "."): value for key, value in params.items()}
    varied += given(arguments, params, {d.name for d in varied})
    config = compose(replace(arguments, overrides=tuple(fixed), multirun=False)).config
    return [with_integers(dimension, config) for dimension in varied]


def shown(space: list[Dimension]) -> list[list[str]]:
    return [[override.text for override in job] for job in samples(space)]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        pytest.param("model.in_features=interval(16,64)", ["16", "64"], id="integers"),
        pytest.param("model.in_features=interval(16.0,64.0)", ["16.0", "64.0"], id="as-floats"),
        pytest.param("optimizer.lr=interval(1,2)", ["1.0", "2.0"], id="a-key-of-floats"),
        pytest.param("optimizer.lr=interval(1e-3,1)", ["0.001", "1.0"], id="exponents"),
        pytest.param("seed=choice(3,4)", ["3", "4"], id="choices"),
        pytest.param("seed=range(2,9,3)", ["2", "8"], id="a-range-has-steps"),
        pytest.param("optimizer.lr=range(0.1,0.5,0.1)", ["0.1", "0.4"], id="a-range-of-floats"),
        pytest.param("seed=range(9,2,-3)", ["3", "9"], id="backwards"),
        pytest.param("seed=range(5,6)", ["5"], id="a-range-of-one"),
    ],
)
def test_the_sample_values_of_a_space(text: str, expected: list[str]) -> None:
    assert [job[0].partition("=")[2] for job in shown(space_of(text))] == expected


def test_a_large_space_is_checked_with_each_choice_once() -> None:
    more = ["optimizer.weight_decay=choice(0,1,2,3,4,5,6)"]
    found = samples(space_of(f"seed=choice({','.join(map(str, range(90)))})", *more))
    assert len(found) == 90
    assert {decay.value for _, decay in found} == set("0123456")


def test_steps_end_where_the_last_one_fits() -> None:
    (dimension,) = space_of(model__in_features={"values": "interval(16,100)", "step": 16})
    assert (dimension.low, dimension.high, dimension.integers) == (16, 96, True)
    assert values_of(dimension) == [16, 32, 48, 64, 80, 96]


@pytest.mark.parametrize(
    ("params", "text"),
    [
        pytest.param({"seed": "3"}, "gives one value only", id="one-value"),
        pytest.param({"seed": "interval(4,1)"}, "the lower end first", id="order"),
        pytest.param({"optimizer.lr": "tag(log,interval(0,1))"}, "above 0", id="log-of-0"),
        pytest.param({"seed": {"step": 2}}, r"seed.values: missing", id="no-values"),
        pytest.param({"seed": {"values": "choice(1,2)", "vale": 1}}, "did you mean val", id="word"),
        pytest.param({"seed": {"values": "choice(1,2)", "step": 1}}, "not fit", id="choices"),
        pytest.param({"seed": {"values": "interval(1,4)", "step": 9}}, "9 does not", id="large"),
        pytest.param({"seed": {"values": "interval(1,4)", "step": "a"}}, "a number", id="a-word"),
        pytest.param(
            {"seed": {"values": "choice(1,2)", "when": {"model": "mlp"}}},
            "when: unknown key; there are values, step",
            id="conditions-are-gone",
        ),
    ],
)
def test_invalid_params_are_refused(params: dict[str, object], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        space_of(**params)


def test_a_grid_needs_countable_values() -> None:
    rate, seed = space_of("optimizer.lr=interval(1,2)", "seed=interval(1,3)")
    with pytest.raises(ConfigError, match=r"^optimizer.lr: sampler=grid takes choices"):
        values_of(rate)
    assert values_of(seed) == [1, 2, 3]


def test_enqueued_values_are_checked() -> None:
    space = space_of("seed=interval(1,9)", "optimizer.lr=interval(0.1,1)", "model=choice(mlp,none)")
    entries = enqueued(space, [{"seed": 3}, {"optimizer.lr": 1, "model": "mlp"}], whole=False)
    assert entries == [{"seed": 3}, {"optimizer.lr": 1, "model": "mlp"}]
    with pytest.raises(ConfigError) as caught:
        enqueued(space, [{"seed": 3.5}, {"lr": 1, "model": "cnn"}], whole=True)
    assert [p.key for p in caught.value.problems] == [
        "sweep.enqueue.0.seed",
        "sweep.enqueue.0",
        "sweep.enqueue.1.lr",
        "sweep.enqueue.1.model",
        "sweep.enqueue.1",
    ]


@pytest.mark.parametrize(
    ("dimension", "expected"),
    [
        pytest.param(
            Dimension("a", choices=("x", "y")), "CategoricalDistribution(choices=('x', 'y'))"
        ),
        pytest.param(
            Dimension("a", low=2, high=8, integers=True, step=3.0),
            "IntDistribution(high=8, log=False, low=2, step=3)",
        ),
        pytest.param(
            Dimension("a", low=1, high=8, log=True),
            "FloatDistribution(high=8.0, log=True, low=1.0, step=None)",
        ),
    ],
)
def test_dimensions_as_optuna_names_them(dimension: Dimension, expected: str) -> None:
    pytest.importorskip("optuna")
    assert str(distribution(dimension)) == expected
