"""The study of a search, as Optuna sees it, and a search of real jobs."""

import csv
import os
import subprocess
import sys
from pathlib import Path

import pytest

from callbacks.support.study import PRUNED_AT
from scripts.composition.overrides import Dimension

pytest.importorskip("optuna")
from scripts.sweeps.study import distribution


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
    assert str(distribution(dimension)) == expected


@pytest.mark.slow
def test_a_real_search_prunes_and_reports(tmp_path: Path) -> None:
    argv = [sys.executable, "-P", "-m", "scripts.train", "-m", "sweep=optuna", "model=mlp"]
    argv += ["experiment=resnet18", "optimizer=sgd_nesterov", "trainer.max_epochs=2"]
    argv += ["trainer.limit_train_batches=2"]
    argv += ["optimizer.lr=choice(0.1,1e-9)", "sweep.sampler=grid", "run_dir=there"]
    argv += ["sweep.enqueue=[{optimizer.lr: 0.1}]", "sweep.pruner=median"]
    argv += ["sweep.pruner_options={n_startup_trials: 1}"]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(argv, cwd=tmp_path, env=env, timeout=400, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    with (tmp_path / "there" / "leaderboard.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert {row["optimizer.lr"]: row["status"] for row in rows} == {
        "0.1": "finished", "1e-09": "pruned",
    }  # fmt: skip
    assert "report: there/report.html" in done.stdout
    assert (tmp_path / "there" / "report.html").exists()


def test_the_attribute_of_pruned_trials_is_our_own() -> None:
    assert PRUNED_AT == "pruned_at"  # in studies that exist: it stays
