"""The report of a sweep, read back."""

import base64
import csv
import io
import json
import re
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from conf.errors import ConfigError
from scripts.sweeps.report import importance, pictures
from scripts.sweeps.report.__main__ import report
from scripts.sweeps.report.gather import gather, thinned
from scripts.sweeps.report.importance import importances
from scripts.sweeps.report.scale import scale_of

NASTY = "<script>alert(1)</script> $x_1^{2"
Make = Callable[..., Path]


@pytest.fixture
def make(tmp_path: Path) -> Make:
    """Return a function that writes a sweep: of each job its values, its state and its curve."""

    def sweep(*jobs: dict[str, Any], metric: str = "val/accuracy", unknown: int = 0) -> Path:
        keys = list(dict.fromkeys(key for job in jobs for key in job["values"]))
        rows = [["job", "status", *keys, metric, "seconds", "run_dir"]]
        for number, job in enumerate(jobs):
            folder = tmp_path / str(number)
            state, curve = job.get("state", "finished"), job.get("curve", [])
            if state != "not started":
                folder.mkdir()
                lines = [
                    {"step": 10 * n, "epoch": n, metric: value, "val/loss": 1 - value}
                    for n, value in enumerate(curve, 1)
                ]
                text = "\n".join(map(json.dumps, lines)) + '\n{"step": 9'
                (folder / "metrics.jsonl").write_text(text)
                results = {"val/loss": 0.25, "test/accuracy": 0.5, "lr/all": 1.0}
                if curve and job.get("best", True):
                    results[f"best/{metric}"] = max(curve)
                status = {"state": state, "code": job.get("code", 0), "results": results}
                status |= {"reason": job.get("reason"), "seconds": 2.5}
                (folder / "status.json").write_text(json.dumps(status))
            values = [job["values"].get(key, "") for key in keys]
            rows.append([str(number), state, *values, "", "", "elsewhere"])
        rows += [["", "not started", *[""] * (len(rows[0]) - 2)]] * unknown
        with (tmp_path / "leaderboard.csv").open("w") as file:
            csv.writer(file).writerows(rows)
        return tmp_path

    return sweep


@pytest.fixture
def mixed(make: Make) -> Path:
    """A sweep of everything that can become of a job."""
    lr = "optimizer.lr"
    return make(
        {"values": {lr: "0.1", "model": "mlp", "model.hidden": "16"}, "curve": [0.5, 0.7, 0.6]},
        {"values": {lr: "0.001", "model": "cnn"}, "curve": [0.2, 0.9, 0.8]},
        {"values": {lr: "0.01", "model": "cnn"}, "curve": [0.95], "state": "pruned"},
        {"values": {lr: "9", "model": NASTY}, "state": "failed", "code": 5, "reason": NASTY},
        {"values": {lr: "1", "model": "mlp"}, "curve": [0.3, 0.4], "state": "preempted",
         "best": False, "code": 143, "reason": "stopped by SIGTERM"},
        {"values": {lr: "2", "model": "mlp"}, "state": "not started"},
        unknown=2,
    )  # fmt: skip


class Page(HTMLParser):
    """Reads a page: its tags must close, and nothing may come from elsewhere."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.rows: list[list[str]] = []
        self.images: list[bytes] = []
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        assert tag not in ("script", "link", "iframe")
        if tag == "img":
            kind, _, data = (given["src"] or "").partition(",")
            assert kind == "data:image/png;base64"
            self.images.append(base64.b64decode(data))
        elif tag != "meta":
            self.open.append(tag)
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] in ("td", "th"):
            self.rows[-1][-1] += data


def test_jobs_are_ranked_and_the_rest_is_listed(mixed: Path) -> None:
    found = gather(mixed)
    assert [(j.outcome.number, j.rank, j.objective, j.step) for j in found.jobs] == [
        (1, 1, 0.9, 20), (0, 2, 0.7, 20), (2, 3, 0.95, 10),
        (3, None, None, None), (4, None, 0.4, 20), (5, None, None, None),
    ]  # fmt: skip
    assert (found.metric, found.larger_is_better, found.unknown) == ("val/accuracy", True, 2)
    assert found.keys == ["optimizer.lr", "model", "model.hidden"]
    assert found.others == ["test/accuracy", "val/loss"]


def test_a_smaller_loss_is_better(make: Make) -> None:
    jobs = [{"values": {"seed": str(n)}, "curve": [value]} for n, value in enumerate((0.3, 0.1))]
    found = gather(make(*jobs, metric="val/loss"))
    assert [job.outcome.number for job in found.jobs] == [1, 0]


def test_the_mode_of_a_metric_of_ones_own_is_the_configurations(make: Make) -> None:
    jobs = [{"values": {"seed": str(n)}, "curve": [value]} for n, value in enumerate((0.3, 0.1))]
    folder = make(*jobs, metric="val/mine")
    with pytest.raises(ConfigError, match="is a larger val/mine better"):
        gather(folder)
    checkpoint = "{monitor: val/mine, mode: min}"
    (folder / "0" / "config.yaml").write_text(f"callbacks: {{checkpoint: {checkpoint}}}")
    assert not gather(folder).larger_is_better


def test_tables_hold_every_job(mixed: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert report([str(mixed)]) == 0
    rows = list(csv.DictReader((mixed / "report" / "leaderboard.csv").open()))
    assert list(rows[0]) == [
        "rank", "job", "status", "optimizer.lr", "model", "model.hidden", "val/accuracy", "step",
        "test/accuracy", "val/loss", "seconds", "run_dir", "error",
    ]  # fmt: skip
    assert [row["rank"] for row in rows] == ["1", "2", "3", "", "", ""]
    assert (rows[0]["val/accuracy"], rows[0]["step"], rows[0]["seconds"]) == ("0.9", "20", "2.5")
    assert rows[3]["error"] == NASTY
    markdown = (mixed / "report" / "leaderboard.md").read_text().splitlines()
    assert len({len(re.findall(r"(?<!\\)\|", line)) for line in markdown}) == 1
    assert len(markdown) == 2 + 6
    out = capsys.readouterr().out.splitlines()
    assert "2 finished, 1 pruned, 1 failed, 1 preempted, 3 not started" in out[0]
    assert out[2].split()[:2] == ["1", "1"]
    assert f"job 3 failed: {NASTY}" in out
    assert out[-1] == f"report: {mixed / 'report.html'}"


def test_the_page_stands_alone(mixed: Path) -> None:
    report([str(mixed), "--quiet"])
    page = Page((mixed / "report.html").read_text())
    assert page.rows[0][:4] == ["rank", "job", "status", "lr"]
    assert len(page.rows) == 1 + 6
    assert NASTY in page.rows[4]
    if pictures.why_none() is None:
        assert len(page.images) == 3
        assert all(image.startswith(b"\x89PNG") for image in page.images)


def test_pictures_are_drawn_for_the_data_that_exist(mixed: Path) -> None:
    pytest.importorskip("matplotlib", reason="pictures take matplotlib, the extra `report`")
    from PIL import Image

    found = gather(mixed)
    drawn = pictures.pictures(found, {"optimizer.lr": 0.7, "model": 0.3})
    assert set(drawn) == {"objective", "parallel", "curves", "importance"}
    for content in drawn.values():
        image = Image.open(io.BytesIO(content)).convert("L")
        assert min(image.size) > 100
        assert len(set(image.resize((200, 200)).tobytes())) > 10  # no empty sheet


def test_an_empty_sweep_has_no_pictures(make: Make) -> None:
    pytest.importorskip("matplotlib", reason="pictures take matplotlib, the extra `report`")
    folder = make({"values": {"seed": "1"}, "state": "failed"}, {"values": {}, "state": "failed"})
    assert pictures.pictures(gather(folder), {}) == {}
    assert report([str(folder), "--quiet"]) == 0


def test_the_report_names_missing_parts(
    mixed: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = importance.importlib.util.find_spec
    missing = ("matplotlib", "optuna")
    monkeypatch.setattr(
        "importlib.util.find_spec", lambda name: None if name in missing else found(name)
    )
    monkeypatch.setattr(importance, "FEWEST", 1)
    assert report([str(mixed)]) == 0
    out = capsys.readouterr().out
    assert "pictures take the package matplotlib: pip install matplotlib" in out
    assert "importance takes the package optuna: pip install optuna" in out
    page = (mixed / "report.html").read_text()
    assert "pip install matplotlib" in page
    assert Page(page).images == []


@pytest.mark.slow
def test_the_key_that_matters_has_the_largest_share(make: Make) -> None:
    pytest.importorskip("optuna")
    jobs = [
        {
            "values": {"optimizer.lr": str(0.001 * 2**n), "model": "ab"[n * n % 3 % 2]},
            "curve": [n / 20],
        }
        for n in range(16)
    ]
    shares = importances(gather(make(*jobs)))
    assert next(iter(shares)) == "optimizer.lr"
    assert sum(shares.values()) == pytest.approx(1)


@pytest.mark.parametrize(
    ("values", "words", "log"),
    [
        pytest.param(["1", "2"], False, False, id="numbers"),
        pytest.param(["0.001", "1"], False, True, id="far-apart"),
        pytest.param(["-1", "1000"], False, False, id="negative"),
        pytest.param(["1", "x"], True, False, id="a-word"),
        pytest.param(["1", "nan"], True, False, id="nan"),
    ],
)
def test_the_scale_of_a_key(make: Make, values: list[str], words: bool, log: bool) -> None:
    found = gather(make(*({"values": {"k": v}, "curve": [0.5]} for v in values)))
    scale = scale_of("k", found.jobs)
    assert (bool(scale.words), scale.log) == (words, log)


def test_a_long_curve_is_thinned_to_its_end() -> None:
    curve = [(n, float(n)) for n in range(10_001)]
    assert len(thinned(curve)) <= 401
    assert thinned(curve)[-1] == curve[-1]
    assert thinned(curve[:5]) == curve[:5]


@pytest.mark.parametrize("content", [None, "", "a,b\n1,2\n"])
def test_a_folder_without_a_sweep_is_refused(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "leaderboard.csv").write_text(content)
    with pytest.raises(ConfigError, match="holds no sweep that can be read"):
        report([str(tmp_path)])
    assert not (tmp_path / "report.html").exists()


def test_help_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert report(["--help"]) == 0
    assert "report.html" in capsys.readouterr().out
