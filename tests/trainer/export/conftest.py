"""A run of three epochs that the tests of exports share. Nobody changes it."""

import pytest

from scripts.cli.arguments import parse_arguments
from scripts.composition.compose import compose
from trainer.inference.run import load_run

SMALL = ("resnet18", "model=small_cnn", "optimizer=sgd_nesterov", "optimizer.lr=0.2")


@pytest.fixture(scope="session")
def trained():
    """Train for three epochs, a small network on the digits if nothing else is said."""
    from scripts.cli.arguments import Request
    from scripts.runs.run import run as train

    def run(path, *more, experiment=SMALL):
        words = [f"experiment={experiment[0]}", *experiment[1:], "trainer.max_epochs=3", *more]
        words += ["loader.num_workers=0", "callbacks.progress=null", f"run_dir={path}"]
        composed = compose(parse_arguments(words))
        assert train(Request(composed.config, composed.overrides, {}, words)) == 0
        return load_run(path, "cpu")

    return run


@pytest.fixture(scope="session")
def run(trained, tmp_path_factory):
    return trained(tmp_path_factory.mktemp("runs") / "run", "callbacks.checkpoint.save_top_k=-1")
