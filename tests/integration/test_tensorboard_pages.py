"""TensorBoard in a real browser: what runs and sweeps have written is on its pages.

`SCREENSHOTS=docs pytest -m slow tests/integration/test_tensorboard_pages.py` draws those of docs/.
"""

import csv
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from urllib.parse import quote

import pytest

from browser import Browser, every, installed
from same_run import logged

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(installed() is None, reason="no Chromium is installed (apt: chromium)"),
]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "resnet18"
    folder.mkdir()
    return folder


@pytest.fixture(scope="module")
def plain(train, job, runs):
    """A finished run with pictures, and what it printed."""
    path = runs / "uninterrupted"
    return path, train([*job, "callbacks=[default,ema,pictures]", f"run_dir={path}"]).out


@pytest.fixture(scope="module")
def resumed(start, train, job, runs):
    """A run of the same training that was killed, and resumed, three times."""
    path = runs / "resumed"
    words = [*job, f"run_dir={path}", "resume=auto"]
    for step in (10, 25, 35):
        run = start(words)
        run.until((path / f"checkpoints/step-{step:08}.pt").exists)
        run.kill()
    train(words)
    return path


@pytest.fixture(scope="module")
def sweep(train, job, runs):
    """A sweep of two jobs that end well and one that diverges, and what it printed."""
    path = runs / "sweep"
    return path, train(["-m", *job, "optimizer.lr=0.1,0.02,1e9", f"run_dir={path}"], 5).out


@pytest.fixture
def page(tmp_path):
    """Run a command that a run has printed, and open its page with a fragment."""
    browsers = []
    servers = []

    def show(command, fragment):
        words = [sys.executable, "-m", "tensorboard.main", *shlex.split(command)[1:]]
        words += ["--port", "0", "--host", "127.0.0.1"]
        servers.append(subprocess.Popen(words, stderr=subprocess.PIPE, text=True))
        lines = iter(servers[-1].stderr.readline, "")
        url = next(filter(None, (re.search(r"http://127\.0\.0\.1:\d+/", t) for t in lines)))[0]
        browsers.append(Browser(tmp_path / "profile", f"{url}#{fragment}"))
        browsers[-1].resize(1300, 800)
        return browsers[-1]

    yield show
    for browser in browsers:
        browser.__exit__()
    for server in servers:
        server.kill()
        server.communicate()


@pytest.fixture
def picture(tmp_path):
    folder = Path(os.environ.get("SCREENSHOTS", tmp_path))
    return lambda name: folder / f"{name}.png"


def printed(out):
    """Return the one command that a run or sweep shows itself with."""
    (command,) = set(re.findall(r"tensorboard --logdir .*", out))
    return command


def go(browser, fragment):
    browser.value(f"location.hash = {json.dumps(fragment)}")


def curves(tag):
    """Return an expression: the curves in the chart of a tag, as SVG paths."""
    card = f"e.localName === 'tf-scalar-card' && e.tag === {json.dumps(tag)}"
    return every("path.line", "e.getAttribute('d')", within=card) + ".filter(Boolean)"


def test_the_curve_of_a_run_killed_three_times_is_that_of_one_that_was_not(
    page, picture, plain, resumed
):
    both = f"tensorboard --logdir {resumed.parent}"
    runs = quote("^[a-z]+/tensorboard")  # not what a kill has left in abandoned/
    tags = quote("loss$|accuracy$")
    browser = page(both, f"scalars&regexInput={runs}&tagFilter={tags}&_smoothingWeight=0")
    browser.shows("uninterrupted/tensorboard", "resumed/tensorboard", "train/loss")
    for tag in ("train/loss", "train/accuracy", "val/loss", "val/accuracy"):
        browser.until(f"{curves(tag)}.length === 2")
    first, second = browser.value(curves("train/loss"))
    points = sum("train/loss" in line for line in logged(plain[0]))
    assert len(re.findall("[ML]", first)) == points >= 10
    assert first == second
    browser.screenshot(picture("tensorboard"))
    assert browser.errors == []


def test_a_run_has_its_charts_pictures_and_texts(page, picture, plain):
    browser = page(printed(plain[1]), "custom_scalars")
    browser.shows("training and validation", "accuracy", "Matches (4)")
    lines = every("path.line", "e.getAttribute('d')", within="e.localName === 'vz-line-chart2'")
    browser.until(f"{lines}.filter(Boolean).length >= 8")  # of loss and accuracy
    go(browser, "images")
    tags = ["confusion/counts", "confusion/shares"]
    tags += [f"samples/{name}" for name in ("train", "val", "misclassified")]
    browser.shows(*tags)
    sizes = every("img[src*=individualImage]", "e.naturalWidth")
    browser.until(f"{sizes}.filter(width => width > 16).length === {len(tags)}")
    browser.screenshot(picture("tensorboard_images"))
    go(browser, "text")
    browser.shows("run/overrides", "callbacks=[default,ema,pictures]", "run/config", "seed: 0")
    assert browser.errors == []


def test_a_sweep_has_a_row_for_each_job(page, picture, sweep):
    folder, out = sweep
    browser = page(printed(out), "hparams")
    with (folder / "leaderboard.csv").open() as file:
        jobs = {row["optimizer.lr"]: row for row in csv.DictReader(file)}
    browser.resize(1500, 400)
    shown = browser.shows("Trial ID", *(f"lr={lr}" for lr in jobs))
    browser.screenshot(picture("tensorboard_hparams"))
    shown = shown[shown.index("Trial ID") :].splitlines()
    assert shown[2:4] == ["optimizer.lr", "best/val/accuracy"]  # what varies, and no more
    assert set(jobs) == {"0.1", "0.02", "1000000000.0"}
    for lr, job in jobs.items():
        place = shown.index(f"lr={lr}")
        assert float(shown[place + 1]) == float(lr)
        if job["status"] == "finished":
            value = float(job["val/accuracy"])
            assert f"{value:#.5g}" in shown[place : place + 10]
    go(browser, f"scalars&tagFilter={quote('^val/accuracy$')}")
    browser.until(f"{curves('val/accuracy')}.length >= 2")
    assert browser.errors == []
