"""A process that imports torch once and forks for each job: `python -m ... DESCRIPTOR`.

It starts no thread and computes nothing, so that forks are safe. It receives requests from the
sweep through a socket (`channel`) and reports the end of each job. When the socket closes, also
because the sweep died, it ends its jobs, which save, and exits.
"""

import contextlib
import gc
import importlib
import multiprocessing
import os
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from typing import Any

from scripts.cli.console import end_with_parent, keep_freed_memory
from scripts.sweeps.launchers.channel import Channel
from trainer.errors import EXIT_CODES

_PATIENCE = 1.0  # seconds
_fork = multiprocessing.get_context("fork")


@dataclass(slots=True)
class _Server:
    channel: Channel
    before: dict[int, Any]  # the signal handlers of the process that started the sweep
    jobs: dict[int, BaseProcess] = field(default_factory=dict)

    def serve(self) -> None:
        """Answer requests until the socket closes."""
        while True:
            waited: list[Any] = [self.channel.socket, *(j.sentinel for j in self.jobs.values())]
            # A worker that outlives its job keeps the sentinel open: the exit code is checked, too.
            ready = wait(waited, _PATIENCE if self.jobs else None)
            for number, job in list(self.jobs.items()):
                if job.sentinel in ready or job.exitcode is not None:
                    self._tell_end(number, job)
            if self.channel.socket in ready and not self._answer_all():
                return self._send(signal.SIGTERM)

    def _answer_all(self) -> bool:
        """Answer all requests that have arrived; return False if the socket is closed."""
        while True:
            request = self.channel.receive()
            if request is None:
                return False
            self._answer(request)
            if not self.channel.waiting:
                return True

    def _answer(self, request: dict[str, Any]) -> None:
        if "signal" in request:
            self._send(request["signal"])
            return
        job = _fork.Process(target=_work, args=(request, self.before, self.channel))
        with _prepared(request):
            job.start()
        assert job.pid is not None
        with contextlib.suppress(OSError):  # the job does the same: either may be first
            os.setpgid(job.pid, job.pid)
        self.jobs[request["number"]] = job
        self.channel.send({"started": request["number"], "pid": job.pid})

    def _tell_end(self, number: int, job: BaseProcess) -> None:
        job.join()
        del self.jobs[number]
        self.channel.send({"ended": number, "code": job.exitcode})
        job.close()

    def _send(self, number: int) -> None:
        for job in self.jobs.values():
            assert job.pid is not None
            with contextlib.suppress(ProcessLookupError):
                # As from a terminal, a Ctrl-C goes to all processes of a job.
                if number == signal.SIGINT:
                    os.killpg(job.pid, number)
                else:
                    os.kill(job.pid, number)


@contextlib.contextmanager
def _prepared(request: dict[str, Any]) -> Iterator[None]:
    """Do here, in the environment of a job, what the process of the job then finds done."""
    if request["prepare"] is None:
        yield
        return
    before = dict(os.environ)
    os.environ.update(request["environment"])
    try:
        with contextlib.suppress(Exception):  # the job does it itself, and says what is wrong
            _function(request["prepare"])(request["argv"])
        yield
    finally:
        for name in request["environment"]:
            os.environ.pop(name, None)
        os.environ.update(before)


def _work(request: dict[str, Any], before: dict[int, Any], channel: Channel) -> None:
    """Run a job in this process, which exits when the job ends."""
    with contextlib.suppress(OSError):
        os.setpgid(0, 0)
    end_with_parent(signal.SIGTERM)
    for number, handler in before.items():
        signal.signal(number, handler)
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    channel.close()
    if request.get("output"):
        _print_to(request["output"])
    os.environ.update(request["environment"])
    sys.argv = [request["call"], *request["argv"]]
    try:
        _function(request["call"])()
    except KeyboardInterrupt:  # before the command has installed its handlers
        sys.exit(EXIT_CODES[signal.SIGINT])


def _print_to(path: str) -> None:
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
    except OSError:  # a full disk: the job reports it for its own files
        return
    for number in (1, 2):
        os.dup2(descriptor, number)
    os.close(descriptor)


def _devices() -> int:
    """Count the accelerators in a separate process: a queried driver does not survive a fork."""
    receiver, sender = _fork.Pipe(duplex=False)
    job = _fork.Process(target=_count, args=(sender,))
    job.start()
    sender.close()
    try:
        return int(receiver.recv())
    except EOFError:
        return 0
    finally:
        job.join()


def _count(sender: Any) -> None:
    torch = importlib.import_module("torch")
    sender.send(torch.accelerator.device_count() if torch.accelerator.is_available() else 0)


def _function(name: str) -> Callable[..., None]:
    module, _, function = name.partition(":")
    found: Callable[..., None] = getattr(importlib.import_module(module), function)
    return found


def _warm_up(name: str, modules: list[str]) -> None:
    gc.disable()
    _function(name)(modules)
    gc.enable()
    gc.collect()
    gc.freeze()  # a collection in a job would copy the memory pages of all imported modules


def main() -> None:
    """Import what jobs need, and serve requests."""
    end_with_parent(signal.SIGTERM)  # during imports a closed socket is not noticed
    keep_freed_memory()  # the jobs as well
    channel = Channel(socket.socket(fileno=int(sys.argv[1])))
    before: dict[int, Any] = {n: signal.signal(n, signal.SIG_IGN) for n in EXIT_CODES}
    signal.signal(signal.SIGTERM, before[signal.SIGTERM])
    hello = channel.receive()
    if hello is None:
        return
    sys.path[:] = hello["path"]
    if hello["warm_up"]:
        _warm_up(hello["warm_up"], hello["modules"])
    channel.send({"devices": _devices() if "torch" in sys.modules else 0})
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    server = _Server(channel, before)
    server.serve()
    for job in server.jobs.values():
        job.join()
    os._exit(0)  # the frozen objects cannot be finalized in order


if __name__ == "__main__":
    main()
