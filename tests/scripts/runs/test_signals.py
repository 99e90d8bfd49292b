"""Signals at any moment: they are noted, and nothing of what they interrupt is changed."""

import contextlib
import os
import random
import signal
import subprocess
import sys
import time
from statistics import median
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from regimen.data.loading.loader import Loader
from regimen.data.orders import Sequential
from regimen.data.samplers import UpdateSampler
from regimen.scripts.cli.signals import end_on_signals
from regimen.scripts.runs.signals import stop_signals
from regimen.trainer.components.sources import StopAwareReader
from regimen.trainer.distributed import Group
from regimen.trainer.errors import EXIT_CODES, stopping_signals
from regimen.trainer.state import TrainState
from regimen.trainer.strategies.strategy import Strategy
from regimen.trainer.tasks.regression import Regression
from regimen.trainer.trainer import Trainer
from toy_runs import FORK


class Drawing:
    """Samples that draw from all three generators."""

    def __init__(self, samples=8):
        self.samples = samples

    def __len__(self):
        return self.samples

    def __getitem__(self, index):
        drawn = torch.rand(1) + random.random() + np.random.random()
        return drawn.float(), drawn.float()


def loader_of(dataset, batch_size=4, **options):
    sampler = UpdateSampler(Sequential(len(dataset)), batch_size=batch_size)
    return Loader(dataset, sampler, seed=1, **options)


def listener():
    """What the handler and a wait need of a trainer."""
    state = TrainState()
    return SimpleNamespace(state=state, group=Group(), reader=StopAwareReader(state, alone=True))


def generators():
    _, keys, *rest = np.random.get_state()
    return torch.get_rng_state().numpy().tobytes(), random.getstate(), keys.tobytes(), rest


def load_disturbed(trials):
    """Load an epoch again and again, with a signal at a random moment; return how many it met."""
    trainer = listener()
    loader = loader_of(Drawing())
    trainer.reader.connect(loader)
    plain = [micro.batch[0] for micro in loader.epoch(0)]
    before = generators()
    moments = random.Random(7)
    met = 0
    lasted = []
    with stop_signals(trainer.state, trainer.group):
        handler = signal.getsignal(signal.SIGUSR1)
        signal.signal(signal.SIGALRM, lambda _, frame: handler(signal.SIGUSR1, frame))
        for trial in range(trials):
            trainer.state.signal, trainer.state.stop_code = None, 0
            started = time.perf_counter()
            if trial >= 10:
                moment = moments.uniform(1e-6, median(lasted))
                signal.setitimer(signal.ITIMER_REAL, moment)
            stream = loader.epoch(0)
            got = []
            while (micro := trainer.reader.next(stream)) is not None:
                got.append(micro.batch[0])
            signal.setitimer(signal.ITIMER_REAL, 0)
            if trial < 10:  # undisturbed, to learn how long it takes
                lasted.append(time.perf_counter() - started)
            assert generators() == before, f"trial {trial}"
            assert all(map(torch.equal, got, plain))
            assert len(got) == len(plain) or trainer.state.stop_code == 143
            met += trainer.state.signal is not None
    return met


@pytest.fixture
def alarm():
    """Whatever a test does when the alarm goes off is undone."""
    previous = signal.getsignal(signal.SIGALRM)
    yield
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, previous)


@pytest.mark.usefixtures("alarm")
def test_thousands_of_signals_leave_the_generators_alone():
    assert load_disturbed(2000) > 100


class Swallowing(Drawing):
    """Is sent a signal in the middle of a sample, by a terminal say, and catches everything."""

    loaded = 0

    def __getitem__(self, index):
        self.loaded += 1
        try:
            if index == 5:
                os.kill(os.getpid(), signal.SIGTERM)
                for _ in range(100):  # a handler that raised would do it here
                    pass
            return torch.ones(1), torch.ones(())
        except:  # noqa: E722
            return torch.full((1,), 99.0), torch.ones(())


def test_a_data_set_that_catches_everything_swallows_no_signal():
    dataset = Swallowing(12)
    model = nn.Linear(1, 1)
    parts = Regression(), torch.optim.SGD(model.parameters(), lr=0.1), loader_of(dataset)
    trainer = Trainer(model, *parts, strategy=Strategy("cpu"))
    seen = []
    model.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0].max().item()))
    with stop_signals(trainer.state, trainer.group):
        trainer.fit()
    state = trainer.state
    assert (state.stop_reason, state.stop_code, state.global_step) == ("SIGTERM", 143, 1)
    assert dataset.loaded == 6  # the sample is finished, its update is not
    assert max(seen) == 1.0


class Slow(Drawing):
    """Never gives its sixth sample."""

    def __getitem__(self, index):
        while index == 5:
            time.sleep(60)  # the fault itself
        return super().__getitem__(index)


@pytest.mark.usefixtures("alarm")
@pytest.mark.parametrize("persistent", [False, True])
def test_a_wait_for_a_slow_worker_ends_with_a_signal(monkeypatch, persistent):
    monkeypatch.setattr("regimen.data.loading.fetch.POLL_SECONDS", 0.05)
    trainer = listener()
    loader = loader_of(Slow(16), num_workers=2, persistent_workers=persistent)
    stream = trainer.reader.connect(loader).epoch(0)
    with stop_signals(trainer.state, trainer.group):
        assert trainer.reader.next(stream) is not None
        workers = list(loader._workers.processes)
        signal.signal(signal.SIGALRM, lambda *_: os.kill(os.getpid(), signal.SIGTERM))
        signal.setitimer(signal.ITIMER_REAL, 0.1)
        assert trainer.reader.next(stream) is None
    assert trainer.state.stop_code == 143
    assert len(workers) == 2
    assert not any(worker.is_alive() for worker in workers)
    loader.close()


def test_only_a_process_that_is_alone_and_waits_is_cut_short():
    trainer = listener()
    loader = loader_of(Drawing())
    trainer.reader.connect(loader)
    trainer.state.signal = ("SIGTERM", 143)
    assert len(list(loader.epoch(0))) == 2
    assert StopAwareReader(trainer.state, alone=False).next(iter([1])) == 1
    assert not trainer.state.stop_code


@pytest.mark.parametrize("ignored", [True, False])
def test_under_nohup_a_closed_terminal_is_nothing(ignored):
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN if ignored else signal.SIG_DFL)
    try:
        trainer = listener()
        with stop_signals(trainer.state, trainer.group):
            assert (signal.SIGHUP in stopping_signals()) is not ignored
            os.kill(os.getpid(), signal.SIGHUP)
        assert trainer.state.signal == (None if ignored else ("SIGHUP", 143))
        assert signal.getsignal(signal.SIGHUP) == (signal.SIG_IGN if ignored else signal.SIG_DFL)
    finally:
        signal.signal(signal.SIGHUP, before)


def _pause(started):
    try:
        started.set()
        while True:  # `signal.pause` would miss a signal that comes right before it
            time.sleep(0.05)
    except KeyboardInterrupt:
        os._exit(7)


@pytest.mark.parametrize("running", [False, True], ids=["early", "in a run"])
def test_a_handler_of_ours_acts_in_no_process_of_the_users(running):
    """A fork is told by a signal to end, as `Pool.terminate` tells its processes, and ends."""
    before = {number: signal.getsignal(number) for number in stopping_signals()}
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, theirs := lambda *_: os._exit(8))
    trainer = listener()
    ended = {}
    try:
        end_on_signals()
        with stop_signals(trainer.state, trainer.group) if running else contextlib.nullcontext():
            for number in EXIT_CODES:
                started = FORK.Event()
                process = FORK.Process(target=_pause, args=(started,))
                process.start()
                assert started.wait(60)
                os.kill(process.pid, number)
                process.join(60)
                ended[number.name] = process.exitcode
                process.kill()
            assert signal.getsignal(signal.SIGHUP) is not theirs  # here ours are still in force
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    assert ended == {"SIGINT": 7, "SIGTERM": -15, "SIGUSR1": -10, "SIGHUP": 8}
    assert trainer.state.signal is None


@pytest.mark.parametrize(("main", "lines"), [(True, 1), (False, 0)], ids=["main", "other"])
def test_a_second_interrupt_leaves_with_one_line(main, lines):
    reader, writer = os.pipe()
    process = os.fork()
    if not process:
        os.dup2(writer, 2)
        trainer = listener()
        trainer.group = SimpleNamespace(is_main=main, world_size=1, on_signal=lambda: None)
        with stop_signals(trainer.state, trainer.group):
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGINT)
        os._exit(9)
    os.close(writer)
    with open(reader) as file:
        text = file.read()
    assert os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) == 130
    assert text.count("\n") == lines
    assert text.startswith("error: ended at once by a second Ctrl-C" if main else "")
    assert ("resume=auto" in text) == main


@pytest.mark.parametrize(("name", "code"), [("SIGINT", 130), ("SIGTERM", 143)])
def test_a_signal_before_the_first_import_is_one_line(name, code):
    early = f"""
import signal, sys, types
from regimen.scripts import commands
first = sys.modules["regimen.scripts.cli.console"] = types.ModuleType("console")
first.run_and_exit = lambda *words: signal.raise_signal(signal.{name})
commands.main("train")
"""
    command = [sys.executable, "-P", "-c", early]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (code, "")
    assert done.stderr == f"error: stopped by {name}: there was nothing to save\n"
