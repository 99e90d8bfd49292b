"""A search: its suggestions, its results, and its resume."""

import importlib.util
import json
import os
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from regimen.callbacks.trial import open_storage
from regimen.conf.errors import ConfigError
from regimen.conf.layout import ROOT
from regimen.conf.yaml_file import dump
from regimen.scripts.cli.arguments import parse_arguments
from regimen.scripts.composition.compose import compose, split_search
from regimen.scripts.sweeps import search as searches
from regimen.scripts.sweeps.grid import composed
from regimen.scripts.sweeps.grid import searches as searches_for
from regimen.scripts.sweeps.search import distribution, enqueued, samples, values_of
from regimen.scripts.sweeps.sweep import Sweep
from regimen.scripts.train import train
from regimen.trainer.errors import CheckpointError, StorageError
from toy_runs import board

optuna = pytest.importorskip("optuna")

PRIMARY = """
defaults: [{model: mlp}, {sweep: null}, _self_]
name: train
data: {}
task: {_target_: torch.nn.Identity}
optimizer: {lr: 0.1, weight_decay: 0.0}
sweep: {report: false}
"""
LINEAR = "_target_: torch.nn.Linear\nin_features: 4\nout_features: 2\n"
TABLE = yaml.safe_load((ROOT / "tests/mistakes.yaml").read_text())
SPACE = ["optimizer.lr=interval(0.0,4.0)", "optimizer.weight_decay=interval(0.0,1.0)"]


class Jobs:
    """Takes the place of processes: the accuracy is best where the learning rate is 3."""

    def __init__(self):
        self.ran = []  # the number and learning rate of each job that was run
        self.more = []  # what jobs are told beside their overrides
        self.at_once = 1
        self.ends = {}  # the state that a job ends with, by its number
        self.dies = None  # the job in which the sweep is killed

    @property
    def rates(self):
        return [lr for _, lr in self.ran]

    @property
    def numbers(self):
        return [number for number, _ in self.ran]

    def run_all(self, it, ask, tell):
        while True:
            asked = [ask() for _ in range(self.at_once)]
            jobs = [job for job in asked if job is not None]
            if not jobs:
                return
            assert len({job.number for job in jobs}) == len(jobs)
            for job in reversed(jobs):
                self.run(job)
                it.write()
                tell(job)

    def run(self, job):
        lr = float(job.overrides.get("optimizer.lr", 0))
        self.ran.append((job.number, lr))
        self.more += job.more_texts
        job.run_dir.mkdir(exist_ok=True)
        (job.run_dir / "overrides.yaml").write_text(json.dumps(job.texts))
        if job.number == self.dies:
            self.dies = None
            raise KeyboardInterrupt
        config = compose(["--config-path", "conf", *job.texts]).config
        (job.run_dir / "config.yaml").write_text(dump({**config, "run_dir": None}))
        state = self.ends.get(job.number, "finished")
        accuracy = None if lr > 3.9 else 1 - (lr - 3) ** 2
        results = {"best/val/accuracy": accuracy, "val/loss": 1.0}
        status = {"state": state, "results": results}
        (job.run_dir / "status.json").write_text(json.dumps(status))
        job.end(5 if state == "failed" else 0)


CONFIGS = {
    "train": PRIMARY,
    "model/mlp": LINEAR,
    "model/none": "_target_: torch.nn.Identity\n",
    "sweep/optuna": "n_trials: 6\nsampler: random\n",
}


@pytest.fixture(autouse=True)
def _configs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, text in CONFIGS.items():
        path = Path("conf", f"{name}.yaml")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def about(monitor):
    """Return what takes the place of the check of built jobs: the metric is all that it tells."""
    return lambda *_: (monitor, {}, ("", []))


@pytest.fixture
def jobs(monkeypatch):
    monkeypatch.setattr(searches, "check_built", about("val/accuracy"))
    found = Jobs()
    monkeypatch.setattr(Sweep, "run", lambda *them: found.run_all(*them))
    return found


def run(*argv):
    arguments = parse_arguments(["-m", "--config-path", "conf", "sweep=optuna", *argv])
    assert searches_for(arguments)
    return searches.search(arguments)


def study_in(place="there/study.journal"):
    return optuna.load_study(study_name="train", storage=open_storage(place))


def test_a_search_of_nothing_is_refused(jobs):
    with pytest.raises(ConfigError, match="nothing to search"):
        run("run_dir=there")
    assert jobs.ran == []
    assert not Path("there").exists()


@pytest.mark.parametrize("row", TABLE["searches"], ids=str)
def test_mistakes_of_a_search(jobs, monkeypatch, row):
    """They stand in the file of the sweep, if they are a text, else on the command line."""
    given, *words = row
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    if words == ["pip install optuna"]:
        monkeypatch.setitem(sys.modules, "optuna", None)
    if isinstance(given, str):
        Path("conf/sweep/optuna.yaml").write_text(f"params:\n  {given}\n")
        argv = []
    else:
        argv = [*SPACE, *given]

    with pytest.raises(ConfigError) as caught:
        run(*argv, "run_dir=there")

    for word in words:
        assert word in str(caught.value)
    assert jobs.ran == []
    # A study that cannot be opened is found only in the folder of the sweep.
    assert Path("there").exists() == (words == ["cannot be opened"])


STEPS = ["optimizer.lr=range(0.5,1.6,0.5)", "optimizer.weight_decay=choice(0.0,0.1)"]
RANDOM_FIRST = "sweep.sampler_options={n_startup_trials: 1}"


SAMPLERS = {
    "tpe": [*SPACE, "sweep.n_trials=4", RANDOM_FIRST],
    "grid": [*STEPS, "sweep.n_trials=99"],
    "cmaes": [*SPACE, "sweep.n_trials=4", RANDOM_FIRST],
    "qmc": [*SPACE, "sweep.n_trials=4"],
}


@pytest.mark.parametrize(
    "sampler",
    [
        "tpe",
        "grid",
        pytest.param("cmaes", marks=pytest.mark.slow),  # imports of some seconds
        pytest.param("qmc", marks=pytest.mark.slow),
    ],
)
def test_a_search_that_was_killed_asks_for_the_same_values(jobs, sampler):
    if sampler == "cmaes":
        pytest.importorskip("cmaes")
    argv = [*SAMPLERS[sampler], f"sweep.sampler={sampler}", "seed=7"]
    assert run(*argv, "run_dir=whole") == 0
    whole = jobs.ran
    assert len(whole) == (6 if sampler == "grid" else 4)  # all combinations, and no more
    assert len(set(jobs.rates)) > 2

    jobs.ran = []
    jobs.dies = 2
    with pytest.raises(KeyboardInterrupt):
        run(*argv, "run_dir=there", "resume=auto")
    assert run(*argv, "run_dir=there", "resume=auto") == 0

    assert jobs.ran == [*whole[:3], *whole[2:]]
    ranked = [row["optimizer.lr"] for row in board("there")]
    assert ranked == [row["optimizer.lr"] for row in board("whole")]


@pytest.mark.parametrize(
    "sampler",
    [
        "tpe",
        pytest.param("cmaes", marks=pytest.mark.slow),  # imports of some seconds
        pytest.param("qmc", marks=pytest.mark.slow),
    ],
)
def test_a_search_with_another_seed_asks_for_other_values(jobs, sampler):
    if sampler == "cmaes":
        pytest.importorskip("cmaes")
    argv = [*SAMPLERS[sampler], f"sweep.sampler={sampler}"]
    run(*argv, "run_dir=one", "seed=7")
    rates = jobs.rates

    jobs.ran = []
    run(*argv, "run_dir=other", "seed=8")

    assert set(rates).isdisjoint(jobs.rates)


def test_a_search_finds_good_values_and_more_trials_go_on(jobs):
    argv = [
        "optimizer.lr=interval(0.0,3.9)",
        "sweep.sampler=tpe",
        "sweep.sampler_options={n_startup_trials: 5}",
        "resume=auto",
        "run_dir=there",
    ]
    assert run(*argv, "sweep.n_trials=10") == 0
    before = board()
    run(*argv, "sweep.n_trials=10")
    assert len(jobs.ran) == 10  # a finished search runs nothing
    assert board() == before

    with Path("there/study.journal").open("ab") as file:
        file.write(b'{"op_code":4,"wor')  # torn by a kill
    run(*argv, "sweep.n_trials=16")

    assert jobs.numbers == list(range(16))
    accuracies = [float(row["val/accuracy"]) for row in board()]
    assert len(accuracies) == 16
    assert accuracies == sorted(accuracies, reverse=True)
    best = accuracies[0]
    assert best > 0.9
    study = study_in()
    assert study.best_value == best
    assert study.direction == optuna.study.StudyDirection.MAXIMIZE
    assert study.metric_names == ["val/accuracy"]


def test_integers_are_drawn_for_a_key_that_the_configuration_does_not_hold():
    (kind,) = space_of("+model.bias_units=interval(1,4)").values()
    assert str(kind) == "IntDistribution(high=4, log=False, low=1, step=1)"
    (kind,) = space_of("+model.scale=interval(1.0,4)").values()
    assert str(kind).startswith("FloatDistribution")


@pytest.mark.parametrize(
    ("reasons", "ran"),
    [
        pytest.param({n: (2, f"model.width={n}.5: whole") for n in range(9)}, 3, id="alike"),
        pytest.param({n: (2, "ab"[n % 2]) for n in range(9)}, 6, id="for several reasons"),
        pytest.param(dict.fromkeys(range(9), (5, "it diverged")), 6, id="by their values"),
        pytest.param(dict.fromkeys(range(1, 9), (2, "it")), 6, id="not the first"),
    ],
)
def test_a_search_whose_first_jobs_fail_alike_ends_with_their_reason(jobs, capsys, reasons, ran):
    own = jobs.run

    def fails(job):
        own(job)
        job.starts = 1
        if job.number in reasons:
            job.state = "failed"
            job.code, job.reason = reasons[job.number]

    jobs.run = fails

    code = run(*SPACE, "run_dir=there")

    assert len(jobs.ran) == ran
    first_code, _ = next(iter(reasons.values()))
    assert code == first_code
    told = "the search ends: all of its first 3 jobs failed alike (exit 2): model.width=0.5: whole"
    ends_early = ran == 3
    assert (told in capsys.readouterr().out) == ends_early


def test_the_study_is_told_the_results_of_jobs(jobs):
    State = optuna.trial.TrialState  # noqa: N806
    argv = [*SPACE, "run_dir=there", "resume=auto", "sweep.n_trials=5"]
    jobs.ends = {1: "failed", 2: "pruned", 3: "preempted"}
    assert run(*argv) == 5
    states = [trial.state for trial in study_in().trials]
    assert states == [State.COMPLETE, State.FAIL, State.PRUNED, State.RUNNING, State.COMPLETE]

    jobs.ran = []
    jobs.ends = {}
    assert run(*argv) == 5  # the failed one stays so

    assert jobs.numbers == [3]  # the preempted one goes on as the trial that it is
    assert study_in().trials[3].state == State.COMPLETE
    assert {row["job"]: row["status"] for row in board()} == {
        "0": "finished",
        "1": "failed",
        "2": "pruned",
        "3": "finished",
        "4": "finished",
    }


@pytest.mark.parametrize("at_once", [1, 3])
def test_a_combination_is_run_once_and_may_log_nothing(jobs, caplog, at_once):
    jobs.at_once = at_once

    run("optimizer.lr=choice(1.0,2.0,2.5,3.95)", "run_dir=there", "sweep.n_trials=20")

    assert sorted(jobs.rates) == [1.0, 2.0, 2.5, 3.95]
    assert len(board()) == 4
    trials = study_in().trials
    assert len(trials) == 20
    values = {trial.params["optimizer.lr"]: trial.value for trial in trials}
    assert values == {"1.0": -3.0, "2.0": 0.0, "2.5": 0.75, "3.95": None}
    assert "it logged no val/accuracy" in caplog.text


def test_a_search_begins_with_the_enqueued_values_and_keeps_the_steps_of_a_file(jobs):
    space = "sampler: random\nparams:\n  optimizer.lr: range(0.0,3.1,0.5)\n"
    file = Path("conf/sweep/optuna.yaml")
    file.write_text(space)
    argv = ["sweep.enqueue=[{optimizer.lr: 2.5}, {optimizer.lr: 1}]", "seed=choice(1,2)"]
    argv += ["run_dir=there", "resume=auto"]

    run(*argv, "sweep.n_trials=8")
    run(*argv, "sweep.n_trials=9")

    assert jobs.rates[:2] == [2.5, 1.0]
    enqueued_trials = [t for t in study_in().trials if "fixed_params" in t.system_attrs]
    assert len(enqueued_trials) == 2  # each once
    assert set(jobs.rates) <= {0.0, 0.5, 1.0, 1.5, 2.0, 2.5, 3.0}
    assert len(set(jobs.rates)) > 2


def test_a_study_elsewhere_comes_from_the_command_line_only(jobs):
    victim = Path("victim.txt")
    victim.write_text("one line")
    Path("conf/sweep/optuna.yaml").write_text("sampler: random\nstorage: victim.txt\n")

    with pytest.raises(ConfigError, match=r'sweep\.storage="victim\.txt"'):
        run(*SPACE, "run_dir=there")

    assert victim.read_text() == "one line"  # nothing is cut


def test_a_study_elsewhere_that_is_none_is_refused_and_not_cut(jobs):
    victim = Path("victim.txt")
    victim.write_text("one line")

    with pytest.raises(CheckpointError) as caught:
        run(*SPACE, "sweep.storage=victim.txt", "run_dir=there")

    assert 'sweep.storage="victim.txt"' not in str(caught.value)
    assert victim.read_text() == "one line"


def test_a_trial_comes_from_the_command_line_only():
    trial = "trial: {storage: victim.db, study: s, number: 0}\n"
    file = Path("conf/sweep/theirs.yaml")
    file.write_text(trial)

    with pytest.raises(ConfigError, match=r"sweep\.trial: comes from the command line only"):
        train(["--config-path", "conf", "sweep=theirs"])

    assert not Path("victim.db").exists()


def test_a_job_knows_its_trial_only_if_it_may_be_pruned(jobs):
    run(*SPACE, "run_dir=without", "sweep.n_trials=1")
    assert jobs.more == []

    pruning = ["sweep.pruner=median", "sweep.pruner_options={n_startup_trials: 2}"]
    run(*SPACE, r"run_dir='it\'s'", "sweep.n_trials=2", *pruning)

    _, word = jobs.more
    config = compose(["--config-path", "conf", word]).config
    study = "it's/study.journal"
    assert config["sweep"]["trial"] == {"storage": study, "study": "train", "number": 1}
    pruner = study_in(study).user_attrs["pruner"]
    assert pruner == {"name": "median", "options": {"n_startup_trials": 2}}


@pytest.mark.parametrize("place", ["shared.journal", "sqlite:///shared.db"])
def test_two_sweeps_share_a_study(jobs, place):
    argv = [*SPACE, f"sweep.storage='{place}'"]
    run(*argv, "sweep.n_trials=2", "run_dir=a")
    run(*argv, "sweep.n_trials=5", "run_dir=b")
    assert len(study_in(place).trials) == 5
    assert len(board("a")) == 2
    assert len(board("b")) == 3

    jobs.ran = []
    run(*argv, "sweep.n_trials=5", "run_dir=a", "resume=auto")

    assert jobs.ran == []
    assert len(board("a")) == 2


def test_a_study_that_began_otherwise_is_refused(jobs, monkeypatch):
    rates = "optimizer.lr=choice(1.0,2.0)"
    argv = ["run_dir=there", "resume=auto"]
    run(rates, *argv, "sweep.n_trials=1", "loader.num_workers=0")
    argv.append("sweep.n_trials=2")

    with pytest.raises(ConfigError, match=r"^optimizer.lr: the study began with .*'1.0', '2.0'"):
        run("optimizer.lr=choice(1.0,3.0)", *argv)
    with pytest.raises(CheckpointError, match=r"began with other values .* has seed=3"):
        run(rates, *argv, "seed=3")
    monkeypatch.setattr(searches, "check_built", about("val/loss"))
    with pytest.raises(CheckpointError, match="is about val/accuracy, and this search about val/l"):
        run(rates, *argv)

    assert len(study_in().trials) == 1


def test_a_study_goes_on_with_what_trains_the_same_or_if_asked(jobs):
    argv = ["optimizer.lr=choice(1.0,2.0)", "run_dir=there", "resume=auto"]
    run(*argv, "sweep.n_trials=1", "loader.num_workers=0")

    run(*argv, "sweep.n_trials=2", "loader.num_workers=1")  # trains the same
    assert len(study_in().trials) == 2
    run(*argv, "sweep.n_trials=3", "seed=3", "resume_policy=override")
    assert len(study_in().trials) == 3


@pytest.mark.parametrize(
    ("content", "name"),
    [
        pytest.param(b"what is this\n{}\n", "study.journal", id="journal"),
        pytest.param(b'{"op_code":5}\n{"op_code":5}\n', "study.journal", id="journal-of-nothing"),
        pytest.param(b"SQLite format 3\0" + b"x" * 4096, "study.db", id="database"),
        pytest.param(b"what is this" * 999, "study.db", id="no-database"),
    ],
)
def test_a_damaged_study_is_a_clear_error(jobs, content, name):
    path = Path(name)
    path.write_bytes(content)

    with pytest.raises(
        CheckpointError, match=rf"^the study .*{name} is damaged \(.*[a-z].*\): move it away"
    ):
        run(*SPACE, f"sweep.storage={name}", "run_dir=there")

    assert jobs.ran == []
    searches.cut_torn_line(path)  # of a journal only
    assert path.read_bytes() == content


def test_a_study_that_cannot_be_written_is_a_clear_error(jobs):
    with pytest.raises(StorageError, match=r"the study nowhere/study.journal: .*No such"):
        run(*SPACE, "sweep.storage=nowhere/study.journal", "run_dir=nowhere_else")


def test_a_study_that_is_locked_is_a_clear_error(jobs):
    place = "sqlite:///study.db?timeout=0.05"
    argv = [*SPACE, f"sweep.storage='{place}'", "run_dir=there", "resume=auto"]
    run(*argv, "sweep.n_trials=2")
    other = sqlite3.connect("study.db")
    other.execute("BEGIN EXCLUSIVE")

    with pytest.raises(StorageError, match="database is locked"):
        run(*argv, "sweep.n_trials=2")

    other.rollback()
    assert len(board()) == 2  # as it was
    run(*argv, "sweep.n_trials=3")
    other.close()


def space_of(*texts):
    arguments = parse_arguments(["-m", "--config-path", "conf", *texts])
    fixed, varied = split_search(arguments)
    (config,) = composed(arguments, [fixed])
    return {dimension: distribution(dimension, config) for dimension in varied}


def grid_of(*texts):
    """Return the values that a grid takes of each dimension, in turn."""
    jobs = samples(space_of(*texts))
    return [[value.value for value in column] for column in zip(*jobs, strict=True)]


@pytest.mark.parametrize(
    ("text", "first_and_last"),
    [
        pytest.param("seed=range(5,6)", ["5"], id="one value"),
        pytest.param("data.x=range(0.1,0.5,0.1)", ["0.1", "0.4"], id="steps of a tenth"),
    ],
)
def test_samples_are_the_first_and_the_last_value(text, first_and_last):
    assert grid_of(text) == [first_and_last]


KINDS = [
    "optimizer.lr=interval(1,2)",
    "seed=interval(1,3)",
    "model.in_features=range(16,97,16)",
    "model=choice(mlp,none)",
    "optimizer.weight_decay=tag(log,interval(1e-3,1))",
]


def test_samples_of_several_dimensions_are_the_ends_of_each():
    assert grid_of(*KINDS) == [
        ["1.0", "2.0"],
        ["1", "3"],
        ["16", "96"],
        ["mlp", "none"],
        ["0.001", "1.0"],
    ]


def test_a_grid_takes_all_values_but_those_of_an_interval_of_numbers():
    rate, seed, features, model, _ = space_of(*KINDS).values()

    assert values_of("", seed) == [1, 2, 3]
    assert values_of("", features) == [16, 32, 48, 64, 80, 96]
    assert values_of("", model) == ["mlp", "none"]
    with pytest.raises(ConfigError, match=r"^optimizer.lr: sampler=grid takes choices"):
        values_of("optimizer.lr", rate)


def test_what_optuna_calls_the_kinds_of_dimensions():
    assert [str(kind) for kind in space_of(*KINDS).values()] == [
        "FloatDistribution(high=2.0, log=False, low=1.0, step=None)",
        "IntDistribution(high=3, log=False, low=1, step=1)",
        "IntDistribution(high=96, log=False, low=16, step=16)",
        "CategoricalDistribution(choices=('mlp', 'none'))",
        "FloatDistribution(high=1.0, log=True, low=0.001, step=None)",
    ]


ENQUEUED = ["seed=interval(1,9)", "optimizer.lr=interval(0.1,1)", "data.x=choice(true,1e-3)"]


def test_enqueued_values_become_those_of_the_space():
    given = [{"seed": 3}, {"optimizer.lr": 1, "data.x": 0.001}, {"data.x": True}]

    found = enqueued(space_of(*ENQUEUED), given, whole=False)

    assert found == [{"seed": 3}, {"optimizer.lr": 1, "data.x": "0.001"}, {"data.x": "True"}]


def test_enqueued_values_out_of_the_space_are_refused():
    space = space_of(*ENQUEUED)

    with pytest.raises(ConfigError) as caught:
        enqueued(space, [{"seed": 3.5}, {"lr": 1, "data.x": "no"}], whole=False)
    keys = [problem.key for problem in caught.value.problems]
    assert keys == ["sweep.enqueue.0", "sweep.enqueue.1.lr", "sweep.enqueue.1"]
    with pytest.raises(ConfigError, match="Inconsistent parameters"):  # a grid has all keys
        enqueued(space, [{"seed": 3}], whole=True)


@pytest.mark.slow
def test_a_real_search_prunes_and_reports(tmp_path):
    argv = [
        sys.executable,
        "-P",
        "-m",
        "regimen.scripts.train",
        "-m",
        "experiment=resnet18",
        "model=mlp",
        "optimizer=sgd_nesterov",
        "optimizer.lr=choice(0.1,1e-9)",
        "trainer.max_epochs=2",
        "trainer.limit_train_batches=2",
        "run_dir=there",
        "sweep=optuna",
        "sweep.sampler=grid",
        "sweep.enqueue=[{optimizer.lr: 0.1}]",
        "sweep.pruner=median",
        "sweep.pruner_options={n_startup_trials: 1}",
    ]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}

    done = subprocess.run(argv, cwd=tmp_path, env=env, timeout=400, capture_output=True, text=True)

    assert done.returncode == 0, done.stderr
    rows = board(tmp_path / "there")
    ended = {row["optimizer.lr"]: row["status"] for row in rows}
    assert ended == {"0.1": "finished", "1e-09": "pruned"}
    drawn = importlib.util.find_spec("matplotlib") is not None  # of the extra `report`
    assert ("report: there/report.png" in done.stdout) == drawn
    assert (tmp_path / "there" / "report.png").exists() == drawn


CHOICE = "seed: 'choice(1,2)'"
PARAMS = "sweep.params={seed:'choice(1,2)'}"


@pytest.mark.parametrize(
    ("params", "typed", "searched"),
    [
        pytest.param("", ["seed=choice(1,2)", "seed=3"], {}, id="a value"),
        pytest.param("", ["seed=3", "seed=choice(1,2)"], {"seed": ("1", "2")}, id="a choice"),
        pytest.param("", ["seed=choice(1,2)", "seed=choice(3,4)"], {"seed": ("3", "4")}, id="both"),
        pytest.param(CHOICE, ["seed=3"], {}, id="typed over a file's"),
        pytest.param(
            CHOICE, ["seed=choice(3,4)"], {"seed": ("3", "4")}, id="a choice typed over a file's"
        ),
        pytest.param("", ["seed=3", PARAMS], {"seed": ("1", "2")}, id="params typed last"),
        pytest.param("", [PARAMS, "seed=3"], {}, id="params typed first"),
    ],
)
def test_a_key_that_is_given_twice_is_searched_by_its_last_word(jobs, params, typed, searched):
    content = f"n_trials: 3\nsampler: random\nparams: {{{params}}}\n"
    file = Path("conf/sweep/optuna.yaml")
    file.write_text(content)

    run("optimizer.lr=interval(0.0,4.0)", *typed, "run_dir=there")

    dimensions = dict(study_in().get_trials()[0].distributions)
    del dimensions["optimizer.lr"]
    assert {name: kind.choices for name, kind in dimensions.items()} == searched
    seeds = {job["seed"] for job in board() if "seed" in job}
    assert seeds <= set(searched.get("seed", ("3",)))
