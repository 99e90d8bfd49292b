"""Compositions that share the files they merge are those that read them."""

from pathlib import Path

import pytest

from conf.errors import ConfigError
from scripts.cli.arguments import Arguments
from scripts.composition import kept
from scripts.composition.compose import compose, compose_ahead
from scripts.composition.kept import keeping_files

COMMANDS = [
    pytest.param(["experiment=resnet18", "model=mlp", "seed=3"], id="a-value"),
    pytest.param(["experiment=resnet18", "model=mlp", "model.hidden=[8]"], id="a-list"),
    pytest.param(["model=mlp", "+callbacks=ema", "~callbacks.early_stopping"], id="added-deleted"),
    pytest.param(["model=mlp", "optimizer._target_=torch.optim.Adam"], id="another-target"),
]


@pytest.mark.parametrize("argv", COMMANDS)
def test_a_second_composition_is_as_the_first(argv: list[str]) -> None:
    alone = compose(argv)
    with keeping_files():
        compose([*argv, "seed=9", "optimizer.lr=0.5", "trainer.max_epochs=7"])
        shared = compose(argv)
    assert (shared.config, shared.choices) == (alone.config, alone.choices)
    assert shared.origins.of("optimizer.lr") == alone.origins.of("optimizer.lr")


def test_a_mistake_has_its_place(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("# @package _global_\ntrainer:\n  max_epoch: 3\n")
    (tmp_path / "experiment").mkdir()
    (tmp_path / "mine.yaml").rename(tmp_path / "experiment" / "mine.yaml")
    argv = ["--config-dir", str(tmp_path), "experiment=mine"]
    with keeping_files():
        for _ in range(2):
            with pytest.raises(ConfigError, match=r"trainer.max_epoch.*mine.yaml:3"):
                compose(argv)


def test_files_are_read_once_as_long_as_they_are_kept(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    file = tmp_path / "model" / "mine.yaml"
    file.write_text("_target_: torch.nn.Linear\nin_features: 3\nout_features: 2\n")
    argv = ["--config-dir", str(tmp_path), "model=mine"]
    with keeping_files():
        compose(argv)
        file.write_text(file.read_text().replace("3", "4"))
        assert compose([*argv, "seed=1"]).config["model"]["in_features"] == 3
    assert compose(argv).config["model"]["in_features"] == 4
    assert kept.recall(Arguments(), []) is None


def test_what_was_composed_ahead_is_taken_once() -> None:
    argv = ["model=mlp", "seed=3"]
    compose_ahead(argv)
    assert compose(["model=mlp", "seed=4"]).config["seed"] == 4
    ahead = compose(argv)
    assert ahead.config["seed"] == 3
    assert compose(argv) is not ahead
    assert compose(argv).config == ahead.config


def test_a_mistake_that_is_composed_ahead_leaves_nothing() -> None:
    compose_ahead(["model=mlp"])
    with pytest.raises(ConfigError):
        compose_ahead(["model=mlq"])
    with pytest.raises(ConfigError):
        compose(["model=mlq"])
