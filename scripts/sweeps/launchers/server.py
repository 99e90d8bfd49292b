"""The sweep's end of the fork server, which is started at the first request."""

import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from scripts.sweeps.launchers.channel import Channel
from scripts.sweeps.launchers.launcher import Ended, error_lines
from trainer.errors import ResourceError

WARM_UP: str | None = "scripts.sweeps.launchers.warm:warm_up"
PREPARE = "scripts.composition.compose:compose_ahead"
_PATIENCE = 60.0  # seconds for the jobs of a server that died to save


class ServerLostError(Exception):
    """The fork server has ended, and its jobs with it."""


class Server:
    """Start functions in separate processes, each a fork of one that has imported torch."""

    def __init__(self) -> None:
        # Except on Linux, forks lose what libraries have set up: each job imports for itself.
        self.warm_up = WARM_UP if sys.platform == "linux" else None
        self.environment: dict[str, str] = {}  # beyond that of the sweep
        self.modules: list[str] = []  # to import besides what every job needs
        self.devices = 0  # accelerators, known once it has started
        self.pids: dict[int, int] = {}  # of the jobs that run
        self._process: subprocess.Popen[bytes] | None = None
        self._channel: Channel | None = None
        self._ended: list[Ended] = []
        self._errors: list[str] = []  # `error:` lines of the job that has our stderr
        self._last = b""  # line of that output, still incomplete
        self._speaks = True  # whether a process still has our stderr

    def ready(self) -> None:
        """Start the server if there is none, and wait until its imports are done."""
        if self._channel is not None:
            return
        self._last, self._speaks = b"", True
        ours, its = socket.socketpair()
        number = its.fileno()
        argv = [sys.executable, "-P", "-m", "scripts.sweeps.launchers.fork_server", str(number)]
        self._process = subprocess.Popen(
            argv,
            stdin=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            pass_fds=[number],
            start_new_session=True,  # the sweep forwards the terminal's signals to jobs
            env={**os.environ, **self.environment},
        )
        its.close()
        self._channel = Channel(ours)
        self._channel.send({"path": sys.path, "warm_up": self.warm_up, "modules": self.modules})
        self.devices = int(self._hear("devices")["devices"])

    def start(
        self,
        number: int,
        call: str,
        argv: Sequence[str],
        environment: Mapping[str, str],
        output: Path | None = None,
        composed: bool = False,
    ) -> None:
        """Call `module:function` in a new process, with `argv` in `sys.argv`.

        It prints into a file, if one is given. With `composed` it finds its configuration composed.
        """
        self.ready()
        assert self._channel is not None
        if output is not None:
            with suppress(OSError):  # as the job finds out
                output.parent.mkdir(exist_ok=True)
        request = {
            "number": number,
            "call": call,
            "argv": list(argv),
            "environment": dict(environment),
            "prepare": PREPARE if composed and self.warm_up else None,
            "output": None if output is None else os.path.abspath(output),
        }
        self._errors.clear()
        self._channel.send(request)
        self.pids[number] = int(self._hear("started")["pid"])

    def wait(self, seconds: float) -> list[Ended]:
        """Return the jobs that have ended: as soon as there is one, or after `seconds`.

        Meanwhile the stderr of jobs without a file is passed on.
        """
        if self._channel is None:
            return []
        deadline = time.monotonic() + seconds
        while not self._ended and (left := deadline - time.monotonic()) > 0:
            try:
                self._note(self._next(left))
            except ServerLostError:
                self._lose()
        ended, self._ended = self._ended, []
        return ended

    def send(self, number: int) -> None:
        """Send a signal to all jobs."""
        if self._channel is not None:
            self._channel.send({"signal": number})

    def close(self) -> None:
        """Close the server; running jobs save and end."""
        if self._channel is None:
            return
        assert self._process is not None
        assert self._process.stderr is not None
        self._channel.close()
        self._channel = None
        self._process.terminate()  # has an effect only during its imports
        while self._read_stderr(None):
            pass
        self._process.wait()
        self._process.stderr.close()

    def _hear(self, kind: str) -> dict[str, Any]:
        """Wait for an answer; jobs that end meanwhile are noted. Raises ResourceError."""
        while True:
            try:
                message = self._next(None)
            except ServerLostError:
                self._lose()
                why = self._last.decode(errors="replace").strip() or "it was killed"
                raise ResourceError(f"the process that starts the jobs has ended: {why}") from None
            if message is not None and kind in message:
                return message
            self._note(message)

    def _next(self, seconds: float | None) -> dict[str, Any] | None:
        """Return the next message, or None after `seconds`; stderr is passed on."""
        assert self._channel is not None
        if not self._channel.waiting:
            ready, _, _ = select.select(self._sources(), [], [], seconds)
            if self._channel.socket not in ready:
                if ready:
                    self._read_stderr(0.0)
                return None
        message = self._channel.receive()
        if message is None:
            raise ServerLostError
        return message

    def _sources(self) -> list[Any]:
        assert self._channel is not None
        assert self._process is not None
        return [self._channel.socket, *([self._process.stderr] if self._speaks else [])]

    def _note(self, message: dict[str, Any] | None) -> None:
        if message is None or "ended" not in message:
            return
        while self._read_stderr(0.0):  # what it printed last
            pass
        number = int(message["ended"])
        del self.pids[number]
        self._ended.append(Ended(number, int(message["code"]), tuple(self._errors)))

    def _read_stderr(self, seconds: float | None) -> bool:
        """Pass on what arrives within `seconds`; return False if nothing does."""
        assert self._process is not None
        assert self._process.stderr is not None
        number = self._process.stderr.fileno()
        if not self._speaks or not select.select([number], [], [], seconds)[0]:
            return False
        said = os.read(number, 1 << 16)
        if not said:
            self._speaks = False
            return False
        sys.stderr.write(said.decode(errors="replace"))
        sys.stderr.flush()
        *lines, self._last = (self._last + said).split(b"\n")
        self._errors += error_lines(b"\n".join(lines).decode(errors="replace"))
        return True

    def _lose(self) -> None:
        """Note that the server has died, and wait for its jobs, which end as well."""
        deadline = time.monotonic() + _PATIENCE
        for number, pid in self.pids.items():
            while time.monotonic() < deadline and _lives(pid):
                time.sleep(0.05)
            self._ended.append(Ended(number, -signal.SIGKILL))
        self.pids.clear()
        self.close()


def _lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True
