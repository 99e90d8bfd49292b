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
    undisturbed_seconds = []
    with stop_signals(trainer.state, trainer.group):
        handler = signal.getsignal(signal.SIGUSR1)
        signal.signal(signal.SIGALRM, lambda _, frame: handler(signal.SIGUSR1, frame))
        for trial in range(trials):
            trainer.state.signal = None
            trainer.state.stop_code = 0
            is_disturbed = trial >= 10  # the first ones tell how long it takes
            started = time.perf_counter()
            if is_disturbed:
                moment = moments.uniform(1e-6, median(undisturbed_seconds))
                signal.setitimer(signal.ITIMER_REAL, moment)
            loaded = batches_until_a_stop(trainer.reader, loader)
            signal.setitimer(signal.ITIMER_REAL, 0)
            if not is_disturbed:
                undisturbed_seconds.append(time.perf_counter() - started)

            assert generators() == before, f"trial {trial}"
            assert all(map(torch.equal, loaded, plain))
            if len(loaded) < len(plain):
                assert trainer.state.stop_code == 143
            if trainer.state.signal is not None:
                met += 1
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


def batches_until_a_stop(reader, loader):
    """Return the inputs of an epoch, up to where a signal cut it short."""
    stream = loader.epoch(0)
    inputs = []
    while True:
        micro = reader.next(stream)
        if micro is None:
            return inputs
        inputs.append(micro.batch[0])


def test_a_data_set_that_catches_everything_swallows_no_signal():
    dataset = Swallowing(12)
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = loader_of(dataset)
    trainer = Trainer(model, Regression(), optimizer, loader, strategy=Strategy("cpu"))
    largest_inputs = []
    model.register_forward_pre_hook(
        lambda module, inputs: largest_inputs.append(inputs[0].max().item())
    )

    with stop_signals(trainer.state, trainer.group):
        trainer.fit()

    assert trainer.state.stop_reason == "SIGTERM"
    assert trainer.state.stop_code == 143
    assert trainer.state.global_step == 1
    assert dataset.loaded == 6  # the sample is finished, its update is not
    assert max(largest_inputs) == 1.0


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


@pytest.mark.parametrize(
    ("handler", "noted"),
    [
        pytest.param(signal.SIG_IGN, None, id="True"),
        pytest.param(signal.SIG_DFL, ("SIGHUP", 143), id="False"),
    ],
)
def test_under_nohup_a_closed_terminal_is_nothing(handler, noted):
    before = signal.signal(signal.SIGHUP, handler)
    try:
        trainer = listener()
        with stop_signals(trainer.state, trainer.group):
            is_stopping = signal.SIGHUP in stopping_signals()
            os.kill(os.getpid(), signal.SIGHUP)
        assert is_stopping == (noted is not None)
        assert trainer.state.signal == noted
        assert signal.getsignal(signal.SIGHUP) == handler
    finally:
        signal.signal(signal.SIGHUP, before)


def _pause(started):
    try:
        started.set()
        while True:  # `signal.pause` would miss a signal that comes right before it
            time.sleep(0.05)
    except KeyboardInterrupt:
        os._exit(7)


def _leave(*_):
    os._exit(8)


def _exit_code_of_a_fork(number):
    """Return with which code a process of the user's ends that is sent a signal."""
    started = FORK.Event()
    process = FORK.Process(target=_pause, args=(started,))
    process.start()
    assert started.wait(60)
    os.kill(process.pid, number)
    process.join(60)
    code = process.exitcode
    process.kill()
    return code


@pytest.mark.parametrize("running", [False, True], ids=["early", "in a run"])
def test_a_handler_of_ours_acts_in_no_process_of_the_users(running):
    """A fork is told by a signal to end, as `Pool.terminate` tells its processes, and ends."""
    before = {number: signal.getsignal(number) for number in stopping_signals()}
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, _leave)
    trainer = listener()
    in_force = contextlib.nullcontext()
    if running:
        in_force = stop_signals(trainer.state, trainer.group)
    ended = {}
    try:
        end_on_signals()
        with in_force:
            for number in EXIT_CODES:
                ended[number.name] = _exit_code_of_a_fork(number)
            assert signal.getsignal(signal.SIGHUP) is not _leave  # here ours are still in force
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    assert ended == {"SIGINT": 7, "SIGTERM": -15, "SIGUSR1": -10, "SIGHUP": 8}
    assert trainer.state.signal is None


def _printed_at_a_second_interrupt(is_main):
    """Interrupt a fork twice; return its exit code and what it printed."""
    reader, writer = os.pipe()
    process = os.fork()
    if process == 0:
        os.dup2(writer, 2)
        trainer = listener()
        trainer.group = SimpleNamespace(is_main=is_main, world_size=1, on_signal=lambda: None)
        with stop_signals(trainer.state, trainer.group):
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGINT)
        os._exit(9)
    os.close(writer)
    with open(reader) as file:
        text = file.read()
    _, status = os.waitpid(process, 0)
    return os.waitstatus_to_exitcode(status), text


def test_a_second_interrupt_leaves_with_one_line():
    code, text = _printed_at_a_second_interrupt(is_main=True)

    assert code == 130
    assert text.count("\n") == 1
    assert text.startswith("error: ended at once by a second Ctrl-C")
    assert "resume=auto" in text


def test_a_second_interrupt_of_another_process_than_the_main_one_says_nothing():
    code, text = _printed_at_a_second_interrupt(is_main=False)

    assert code == 130
    assert text == ""


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

    assert done.returncode == code
    assert done.stdout == ""
    assert done.stderr == f"error: stopped by {name}: there was nothing to save\n"
