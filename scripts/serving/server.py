"""Listen, load the run, answer until a signal comes."""

from __future__ import annotations

import ipaddress
import secrets
import signal
import socket
from concurrent.futures import ThreadPoolExecutor

import uvicorn

from conf.errors import ConfigError, Problem
from scripts.serving.answers import Answerer
from scripts.serving.app import Access, Demo
from trainer.errors import EXIT_CODES, stopping_signals
from trainer.inference.run import Run

_CONNECTIONS = 512  # open at once; further ones get status 503
_LOCAL = frozenset({"127.0.0.1", "localhost", "::1"})


def serve(run: Run, checkpoint: str, top_k: int, host: str, port: int) -> int:
    """Show a run on `host`; return the exit code of the signal that ended it.

    Raises ConfigError for an address that is not available or a run without pictures.
    """
    listener = _listen(host, port)
    local = is_local(host)
    token = None if local else secrets.token_urlsafe(16)
    with listener, ThreadPoolExecutor(max_workers=1) as worker:
        answerer = Answerer(run, checkpoint, top_k)
        card = answerer.card()
        worker.submit(answerer.open).result()
        access = Access(token, _LOCAL | {host})
        demo = Demo(answerer, worker, access, card)
        config = uvicorn.Config(
            demo.app(),
            http="h11",
            ws="none",
            lifespan="off",
            log_config=None,
            log_level="warning",
            access_log=False,  # it would contain the token
            server_header=False,
            limit_concurrency=_CONNECTIONS,
            timeout_graceful_shutdown=2,
        )
        server = _Server(config, address(listener, host, token))
        codes = _ends_by_signal(server)
        server.run(sockets=[listener])
        worker.submit(answerer.close).result()
    return codes[-1] if codes else 0


class _Server(uvicorn.Server):
    """Print the address once the server accepts requests."""

    def __init__(self, config: uvicorn.Config, where: str) -> None:
        super().__init__(config)
        self._where = where

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Begin to listen."""
        await super().startup(sockets)
        print(f"{self._where}\nCtrl-C ends it", flush=True)


def is_local(host: str) -> bool:
    """Return whether an address can be reached from this machine only."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def address(listener: socket.socket, host: str, token: str | None) -> str:
    """Return the URL to open; with the token, where there is one."""
    everywhere = host in ("0.0.0.0", "::")
    name = socket.gethostname() if everywhere else f"[{host}]" if ":" in host else host
    return f"http://{name}:{listener.getsockname()[1]}/" + (f"?token={token}" if token else "")


def _listen(host: str, port: int) -> socket.socket:
    """Bind before the model is loaded, so that a port in use is reported at once."""
    try:
        family, kind, number, _, where = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except OSError as error:
        problem = Problem("host", f"{host} is no address here: {error.strerror}")
        raise ConfigError(problem) from error
    listener = socket.socket(family, kind, number)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(where)
        listener.listen()
    except OSError as error:
        listener.close()
        hint = "port=0 takes one that is free"
        problem = Problem("port", f"cannot listen on {host}:{port}: {error.strerror}", hint)
        raise ConfigError(problem) from error
    return listener


def _ends_by_signal(server: uvicorn.Server) -> list[int]:
    """Stop the server on each signal that stops a command; return the list of their exit codes."""
    codes: list[int] = []

    def stop(number: int, _: object) -> None:
        codes.append(EXIT_CODES[signal.Signals(number)])
        server.should_exit = True

    for number in stopping_signals():
        signal.signal(number, stop)
    return codes
