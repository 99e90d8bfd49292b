"""A job is its overrides, in whatever order and spelling."""

import pytest

from conf.errors import ConfigError
from scripts.composition.identity import identity


@pytest.mark.parametrize(
    ("one", "other"),
    [
        pytest.param(["seed=1", "model=mlp"], ["model=mlp", "seed=1"], id="order"),
        pytest.param(["optimizer.lr=1e-3"], ["optimizer.lr=0.001"], id="spelling"),
        pytest.param(["+model.x=1"], ["model.x=1"], id="addition"),
        pytest.param(["seed=1"], ["seed=1", "run_dir='a b'", "resume=auto"], id="placement"),
        pytest.param(["seed=1"], ["+sweep=optuna", "sweep.n_trials=3", "seed=1"], id="sweep"),
        pytest.param(["model.widths=[1, 2]"], ["model.widths=[1,2]"], id="lists"),
    ],
)
def test_the_same_job(one: list[str], other: list[str]) -> None:
    assert identity(one) == identity(other)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        pytest.param(["seed=1"], ["seed=2"], id="value"),
        pytest.param(["seed=1"], ["seed=1", "model=mlp"], id="one-more"),
        pytest.param(["seed=1", "seed=2"], ["seed=2", "seed=1"], id="the-last-counts"),
        pytest.param(["~a.b"], ["a.b=null"], id="deletion"),
        pytest.param(["a=1"], ["a=1.0"], id="type"),
    ],
)
def test_different_jobs(one: list[str], other: list[str]) -> None:
    assert identity(one) != identity(other)


def test_what_is_no_override() -> None:
    with pytest.raises(ConfigError, match="not an override"):
        identity(["=="])
