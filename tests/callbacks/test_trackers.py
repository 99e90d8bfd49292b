"""A tracker that is a list: what is sent, once, and what happens while it is down."""

import json
import logging

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
        self.store[self.run_id] += [(step, k, v) for k, v in values.items() if k != "epoch"]

    def send_end(self, results, files):
        self._fail_if_down()
        self.ended.append(results.state)

    def _fail_if_down(self):
        if self.down:
            raise ConnectionError("no route to host")


def points(store):
    (run,) = store.values()
    return run


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
    lines = [{"step": step, "epoch": 0, key: value} for step, key, value in kept]
    (tmp_path / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    payload = first.state_dict()
    carry_over(first, second)
    second.fit()
    third.load_state_dict(payload, hyper_parameters=False)
    third.fit()
    old, new = store.values()
    assert new[: len(kept)] == kept
    assert sorted({s for s, *_ in new}) == sorted({s for s, *_ in old})
    assert [p for p in new if p[0] > 5] != [p for p in old if p[0] > 5]


def test_a_tracker_that_is_down_is_one_warning_and_gets_all_when_it_is_back(
    make_trainer, tmp_path, caplog, monkeypatch
):
    now, whole, tracker = [0.0], {}, Listed({})
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    make_trainer({"tracker": Listed(whole)}, tmp_path / "whole").fit()
    tracker.down = True
    trainer = make_trainer({"log": MetricsLog(), "tracker": tracker}, tmp_path / "down")
    with caplog.at_level(logging.WARNING):
        trainer.fit()
        tracker.down = False
        trainer.log_text("words", "lost: pictures and texts do not wait")
        trainer.log({"test/loss": 1.0})  # within the pause
        assert tracker.store == {}
        now[0] += 61
        trainer.log({"test/accuracy": 1.0})
    assert [record.getMessage() for record in caplog.records] == [
        "callbacks.tracker: no route to host; training continues without it"
    ]
    assert points(tracker.store)[:-2] == points(whole)
    trainer.end(Results("pruned"))
    assert tracker.ended == ["pruned"]


@pytest.mark.parametrize("next_start", [False, True])
def test_what_a_tracker_missed_is_sent_at_the_end_or_by_the_next_start(
    make_trainer, tmp_path, carry_over, next_start
):
    class Outage(Callback):
        def on_update_end(self, trainer):
            tracker.down = trainer.state.global_step > 3

    whole, store = {}, {}
    make_trainer({"tracker": Listed(whole)}, tmp_path / "whole").fit()
    tracker = Listed(store)
    callbacks = {"outage": Outage(), "log": MetricsLog(), "tracker": tracker}
    stop = StopAt(7 if next_start else None)
    first = make_trainer({**callbacks, "stop": stop}, tmp_path / "cut")
    second = make_trainer({"log": MetricsLog(), "tracker": Listed(store)}, tmp_path / "cut")
    first.fit()
    assert {step for step, *_ in points(store)} == {2}
    tracker.down = next_start
    first.end(Results("preempted"))
    if next_start:
        carry_over(first, second)
        second.fit()
    assert sorted(points(store)) == sorted(points(whole))


def test_names_of_a_job_are_what_varies_in_its_sweep(tmp_path):
    job = tmp_path / "night" / "3"
    job.mkdir(parents=True)
    (job / "config.yaml").write_text("name: digits\noptimizer: {lr: 0.1}\n")
    (job / "overrides.yaml").write_text(
        "- optimizer.lr=0.1\n- +data.seed=2\n- trainer.max_epochs=1\n"
    )
    alone = names_of(job, "")
    assert (alone.project, alone.run, alone.sweep) == ("digits", "3", None)
    (tmp_path / "night" / "sweep.json").write_text('{"swept": ["optimizer.lr", "data.seed"]}')
    names = names_of(job, "")
    assert (names.project, names.run, names.sweep) == ("digits", "lr=0.1,seed=2", "digits/night")
    assert names_of(tmp_path / "x", "name: y").project == "y"  # from Python: no config.yaml


@pytest.mark.parametrize("artifacts", ["links", "files", None])
def test_files_of_a_run_are_bounded(tmp_path, artifacts):
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "trackers").mkdir()
    for name, size in (("a.yaml", 10), ("checkpoints/step-2.pt", 900), ("trackers/x.json", 5)):
        (tmp_path / name).write_bytes(bytes(size))
    (tmp_path / "checkpoints" / "best.pt").hardlink_to(tmp_path / "checkpoints" / "step-2.pt")
    (tmp_path / ".tmp-b").touch()
    (tmp_path / ".lock").touch()
    tracker = Listed({})
    tracker.run, tracker.artifacts, tracker.max_megabytes = tmp_path, artifacts, 1e-4
    expected = ["a.yaml", "checkpoints/best.pt"] if artifacts == "links" else ["a.yaml"]
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
