"""A tracker that is a list: what is sent, once, and what happens while it is down."""

import json
import logging
from types import SimpleNamespace

import pytest

from regimen.callbacks.trackers import recorder as module
from regimen.callbacks.trackers.mlflow import MLflow
from regimen.callbacks.trackers.recorder import MetricsLog, Tracker, names_of
from regimen.callbacks.trackers.wandb import WandB
from regimen.conf.errors import ConfigError
from regimen.trainer.callback import Callback, Results
from toys import StopAt


class Listed(Tracker):
    package = "torch"

    def __init__(self, store):
        super().__init__(max_megabytes=1.0)
        self.store = store  # tracked runs, with their points
        self.down = False
        self.ended = []
        self.run_id = ""

    def connect(self, names, tracked):
        self._fail_if_down()
        self.run_id = tracked.get("run_id", "")
        if not self.run_id:
            self.run_id = f"{names.project}-{len(self.store)}"
            self.store[self.run_id] = []
        return {"run_id": self.run_id}, self.run_id

    def send(self, step, values):
        self._fail_if_down()
        points = [(step, name, value) for name, value in values.items() if name != "epoch"]
        self.store[self.run_id] += points

    def send_end(self, results, files):
        self._fail_if_down()
        self.ended.append(results.state)

    def _fail_if_down(self):
        if self.down:
            raise ConnectionError("no route to host")


def points(store):
    """Return the points (step, name, value) of the one tracked run."""
    (run,) = store.values()
    return run


def steps_of(points):
    return {step for step, _, _ in points}


def write_log(folder, points):
    lines = [json.dumps({"step": step, "epoch": 0, name: value}) for step, name, value in points]
    (folder / "metrics.jsonl").write_text("".join(f"{line}\n" for line in lines))


@pytest.mark.parametrize("cut", [3, 5, 6])
def test_a_resumed_run_goes_on_without_doubled_points(run_twice, cut):
    stores = {"whole": {}, "cut": {}}
    run_twice(lambda name: Listed(stores[name]), cut)
    assert sorted(points(stores["cut"])) == sorted(points(stores["whole"]))


def test_other_hyper_parameters_begin_another_tracked_run(make_trainer, tmp_path, carry_over):
    store = {}
    first = make_trainer({"tracker": Listed(store), "stop": StopAt(5)}, tmp_path)
    second = make_trainer({"tracker": Listed(store)}, tmp_path)
    third = make_trainer({"tracker": Listed(store)}, tmp_path, lr=0.01)
    first.fit()
    kept = points(store).copy()
    write_log(tmp_path, kept)
    payload = first.state_dict()
    carry_over(first, second)
    second.fit()
    third.load_state_dict(payload, hyper_parameters=False)
    third.fit()

    old, new = store.values()
    later_old = [point for point in old if point[0] > 5]
    later_new = [point for point in new if point[0] > 5]

    assert new[: len(kept)] == kept
    assert steps_of(new) == steps_of(old)
    assert later_new != later_old


def test_a_tracker_that_is_down_is_one_warning_and_gets_all_when_it_is_back(
    make_trainer, tmp_path, caplog, monkeypatch
):
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(module.time, "monotonic", lambda: clock.now)
    whole = {}
    make_trainer({"tracker": Listed(whole)}, tmp_path / "whole").fit()
    tracker = Listed({})
    tracker.down = True
    trainer = make_trainer({"log": MetricsLog(), "tracker": tracker}, tmp_path / "down")
    with caplog.at_level(logging.WARNING):
        trainer.fit()
        tracker.down = False
        trainer.log_text("words", "lost: pictures and texts do not wait")
        trainer.log({"test/loss": 1.0})
        assert tracker.store == {}  # within the pause
        clock.now += 61
        trainer.log({"test/accuracy": 1.0})

    (warning,) = [record.getMessage() for record in caplog.records]
    *trained, _, _ = points(tracker.store)

    assert warning == "callbacks.tracker: no route to host; training continues without it"
    assert trained == points(whole)

    trainer.end(Results("pruned"))
    assert tracker.ended == ["pruned"]


class Outage(Callback):
    """The tracker is down from the fourth update on."""

    def __init__(self, tracker):
        self.tracker = tracker

    def on_update_end(self, trainer):
        self.tracker.down = trainer.state.global_step > 3


@pytest.fixture
def whole(make_trainer, tmp_path):
    """Return the points of a run without an outage."""
    store = {}
    make_trainer({"tracker": Listed(store)}, tmp_path / "whole").fit()
    return sorted(points(store))


def test_what_a_tracker_missed_is_sent_at_the_end(make_trainer, tmp_path, whole):
    store = {}
    tracker = Listed(store)
    callbacks = {
        "outage": Outage(tracker),
        "log": MetricsLog(),
        "tracker": tracker,
    }
    trainer = make_trainer(callbacks, tmp_path / "cut")
    trainer.fit()

    assert steps_of(points(store)) == {2}

    tracker.down = False
    trainer.end(Results("preempted"))
    assert sorted(points(store)) == whole


def test_what_a_tracker_missed_is_sent_by_the_next_start(make_trainer, tmp_path, carry_over, whole):
    store = {}
    tracker = Listed(store)
    callbacks = {
        "outage": Outage(tracker),
        "log": MetricsLog(),
        "tracker": tracker,
    }
    first = make_trainer({**callbacks, "stop": StopAt(7)}, tmp_path / "cut")
    second = make_trainer({"log": MetricsLog(), "tracker": Listed(store)}, tmp_path / "cut")
    first.fit()
    first.end(Results("preempted"))

    assert steps_of(points(store)) == {2}

    carry_over(first, second)
    second.fit()
    assert sorted(points(store)) == whole


def test_names_of_a_job_are_what_varies_in_its_sweep(tmp_path):
    job = tmp_path / "night" / "3"
    job.mkdir(parents=True)
    overrides = "- optimizer.lr=0.1\n- +data.seed=2\n- trainer.max_epochs=1\n"
    (job / "config.yaml").write_text("name: digits\noptimizer: {lr: 0.1}\n")
    (job / "overrides.yaml").write_text(overrides)

    alone = names_of(job, "")

    assert alone.project == "digits"
    assert alone.run == "3"
    assert alone.sweep is None

    (job.parent / "sweep.json").write_text('{"swept": ["optimizer.lr", "data.seed"]}')
    names = names_of(job, "")
    assert names.project == "digits"
    assert names.run == "lr=0.1,seed=2"
    assert names.sweep == "digits/night"

    from_python = names_of(tmp_path / "x", "name: y")  # no config.yaml
    assert from_python.project == "y"


@pytest.mark.parametrize(
    ("artifacts", "expected"),
    [
        pytest.param("links", ["a.yaml", "checkpoints/best.pt"], id="links"),
        pytest.param("files", ["a.yaml"], id="files"),
        pytest.param(None, ["a.yaml"], id="none"),
    ],
)
def test_files_of_a_run_are_bounded(tmp_path, artifacts, expected):
    checkpoints = tmp_path / "checkpoints"
    checkpoints.mkdir()
    (tmp_path / "trackers").mkdir()
    (tmp_path / "a.yaml").write_bytes(bytes(10))
    (checkpoints / "step-2.pt").write_bytes(bytes(900))
    (checkpoints / "best.pt").hardlink_to(checkpoints / "step-2.pt")
    (tmp_path / "trackers/x.json").write_bytes(bytes(5))
    (tmp_path / ".tmp-b").touch()
    (tmp_path / ".lock").touch()
    tracker = Listed({})
    tracker.run = tmp_path
    tracker.artifacts = artifacts
    tracker.max_megabytes = 1e-4  # 100 bytes

    assert list(tracker.files()) == expected


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        pytest.param(MLflow, {"tracking_uri": "ftp://x"}, "choose sqlite:///FILE", id="scheme"),
        pytest.param(MLflow, {"artifacts": "all"}, "choose links, files or null", id="artifacts"),
        pytest.param(MLflow, {"max_megabytes": 0}, "choose a positive number", id="bound"),
        pytest.param(WandB, {"mode": "disabled"}, "choose offline or online", id="mode"),
        pytest.param(WandB, {}, "not_here is not installed: pip install not_here", id="package"),
    ],
)
def test_options(monkeypatch, kind, options, message):
    monkeypatch.setattr(kind, "package", "torch" if options else "not_here")
    with pytest.raises(ConfigError, match=message):
        kind(**options)
