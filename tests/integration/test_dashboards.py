"""TensorBoard in a real browser, served from real runs by the commands that they print."""

from __future__ import annotations

import json
import re
import shlex
import signal
import subprocess
import sys
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from browser import Browser, installed

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(installed() is None, reason="no Chromium is installed (apt: chromium)"),
]

SMALL = [
    "experiment=resnet18",
    "model=small_cnn",
    "loader.num_workers=0",
    "trainer.log_every_n_steps=4",
    "trainer.max_epochs=3",
]
# TensorBoard's elements have trees of their own, which innerText does not look into.
TEXT = """(() => {
  const out = [];
  const walk = (node) => {
    if (node.nodeType === 3 && node.textContent.trim()) out.push(node.textContent.trim());
    if (['STYLE', 'SCRIPT', 'TEMPLATE'].includes(node.tagName)) return;
    if (node.tagName === 'INPUT') out.push(node.value);
    if (node.shadowRoot) walk(node.shadowRoot);
    for (const child of node.childNodes) walk(child);
  };
  walk(document.body);
  return out.join('\\n');
})()"""
# Images that are loaded, and charts that are drawn.
SHOWN = """((wanted) => {
  let found = 0;
  const walk = (node) => {
    if (node.nodeType === 1 && node.matches(wanted)) {
      const box = node.getBoundingClientRect();
      const loaded = node.tagName !== 'IMG' || node.naturalWidth > 20;
      if (box.width > 20 && box.height > 20 && loaded) found += 1;
    }
    if (node.shadowRoot) walk(node.shadowRoot);
    for (const child of node.childNodes) walk(child);
  };
  walk(document.body);
  return found;
})"""


class Board:
    """A TensorBoard that is served, and a page of it."""

    def __init__(self, url: str, browser: Browser) -> None:
        self.url, self.browser = url, browser

    def get(self, path: str, **query: str) -> Any:
        words = urllib.parse.urlencode(query)
        with urllib.request.urlopen(f"{self.url}data/{path}?{words}", timeout=60) as answer:
            return json.load(answer)

    def open(self, tab: str) -> None:
        self.browser.ask("Page.navigate", url="about:blank")
        self.browser.ask("Page.navigate", url=f"{self.url}#{tab}")
        self.browser.until("document.body && document.body.childElementCount > 0")

    def until_text(self, *texts: str) -> None:
        wanted = " && ".join(f"t.includes({json.dumps(text)})" for text in texts)
        self.browser.until(f"((t) => {wanted})({TEXT})", seconds=180)

    def until_shown(self, selector: str, count: int) -> None:
        self.browser.until(f"{SHOWN}({json.dumps(selector)}) >= {count}", seconds=180)


@contextmanager
def served(command: str, profile: Path) -> Iterator[Board]:
    """Run the printed command, on a free port, and open a browser."""
    program, *arguments = shlex.split(command)
    assert program == "tensorboard"
    assert arguments[-2:] == ["--host", "127.0.0.1"]
    process = subprocess.Popen(
        [sys.executable, "-m", "tensorboard.main", *arguments, "--port", "0"],
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None
    try:
        lines = iter(process.stderr.readline, "")
        url = next(found[0] for line in lines if (found := re.search(r"http://127\S+", line)))
        with Browser(profile, url) as browser:
            yield Board(url, browser)
    finally:
        process.kill()
        process.wait()
        process.stderr.close()


def printed(text: str) -> str:
    """Return the one command for TensorBoard that a run or a sweep prints, however often."""
    (command,) = set(re.findall(r"tensorboard --logdir.*", text))
    return str(command)


def test_a_run_shows_curves_pictures_texts_and_settings(train: Any, tmp_path: Path) -> None:
    (tmp_path / "lab").mkdir()
    run = train([*SMALL, "callbacks=[default,pictures]", f"run_dir={tmp_path}/lab/run"])
    assert run.code == 0, run.err
    with served(printed(run.out + run.err), tmp_path / "profile") as board:
        assert board.get("runs") == ["lab/run"]
        board.open("timeseries")
        board.until_text("lab/run", "best/val/accuracy")
        board.open("custom_scalars")
        board.until_text("training and validation", "loss")
        board.until_shown("svg, canvas", 1)
        board.open("images")
        board.until_text("samples/train", "confusion/shares")
        board.until_shown("img", 2)
        board.open("text")
        board.until_text("run/config", "models.small_cnn.SmallCNN", "trainer.max_epochs=3")
        board.open("pr_curves")
        board.until_text("pr_curve/7")
        board.open("hparams")
        results = json.loads((tmp_path / "lab/run/status.json").read_text())["results"]
        board.until_text("loader.batch_size", "best/val/accuracy", "test/loss", "lab/run")
        board.until_text(f"{results['test/accuracy']:.4g}"[:5])


def test_a_run_that_was_resumed_three_times_has_whole_curves(
    start: Any, train: Any, tmp_path: Path
) -> None:
    (tmp_path / "lab").mkdir()
    arguments = [*SMALL, "callbacks.checkpoint.every_n_steps=5", f"run_dir={tmp_path}/lab/run"]
    log = tmp_path / "lab/run/metrics.jsonl"
    for steps in (8, 24, 44):
        run = start([*arguments, "resume=auto"])
        run.until(lambda steps=steps: log.exists() and f'"step": {steps},' in log.read_text())
        run.send(signal.SIGTERM)
        assert run.wait().code == 143, run.err
    run = train([*arguments, "resume=auto"])
    assert run.code == 0, run.err
    with served(printed(run.out + run.err), tmp_path / "profile") as board:
        board.open("timeseries")
        board.until_text("lab/run", "train/epoch_loss")
        points = board.get("plugin/scalars/scalars", run="lab/run", tag="train/loss")
        assert [step for _, step, _ in points] == sorted({*range(4, 61, 4), 20, 40, 60})


def test_a_sweep_shows_its_jobs_by_what_varies(train: Any, tmp_path: Path) -> None:
    swept = ["optimizer.lr=0.1,1e9", f"run_dir={tmp_path}/sweep"]
    run = train(["-m", *SMALL, *swept])
    assert run.code == 5, run.err  # the second job diverges
    with served(printed(run.out), tmp_path / "profile") as board:
        names = ["lr=0.1", "lr=1000000000.0"]
        assert sorted(board.get("runs")) == names
        board.open("hparams")
        board.until_text(*names, "optimizer.lr", "best/val/accuracy", "test/accuracy")
