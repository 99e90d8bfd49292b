"""The HTTP side of `demo`: three addresses, access to them, and limits on uploads."""

from __future__ import annotations

import asyncio
import logging
import re
import secrets
from base64 import b64encode
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import Executor
from dataclasses import dataclass
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Route

from scripts.serving.answers import Answerer
from scripts.serving.intake import UploadError

logger = logging.getLogger("regimen")

MAX_BYTES = 20_000_000  # of an upload
MAX_WAITING = 32  # requests at once; all their uploads are in memory
_READ_SECONDS = 30
_DRAINED = 1_000_000_000  # bytes that are read, so that a client receives the refusal
_PAGE = Path(__file__).with_name("page.html")
_TOP_K = re.compile(r"[1-9]\d{0,5}")


@dataclass(frozen=True, slots=True)
class Access:
    """Access control: by a token, or without one by a local name in Host.

    A foreign page's requests to 127.0.0.1 carry the foreign name in Host (DNS rebinding) or in
    Origin.
    """

    token: str | None
    names: frozenset[str]

    def refusal(self, request: Request) -> UploadError | None:
        """Return why a request is refused; None if it is not."""
        host = request.headers.get("host", "")
        origin = request.headers.get("origin")
        if origin is not None and origin.partition("://")[2] != host:
            return UploadError(403, f"the page {origin} is not this server's")
        if self.token is not None:
            given = request.headers.get("authorization", "").removeprefix("Bearer ")
            given = given or request.query_params.get("token", "")
            if not secrets.compare_digest(given.encode(), self.token.encode()):
                return UploadError(401, "give the token that the command printed: ?token=TOKEN")
        elif _name(host) not in self.names:
            return UploadError(403, f"Host is {host}: this server is {min(self.names)}")
        return None


class Demo:
    """Answer requests with a run's model, one after another in the thread of `worker`."""

    def __init__(
        self, answerer: Answerer, worker: Executor, access: Access, card: Mapping[str, Any]
    ) -> None:
        self._answerer = answerer
        self._worker = worker
        self._access = access
        self._card = {**card, "max_bytes": MAX_BYTES}
        self._waiting = 0
        self._html = _PAGE.read_text(encoding="utf-8")
        self._headers = _headers(self._html)

    def app(self) -> Starlette:
        """Return the application."""
        routes = [
            Route("/", self._guarded(self._page)),
            Route("/card", self._guarded(self._run_card)),
            Route("/predict", self._guarded(self._predict), methods=["POST"]),
        ]
        return Starlette(routes=routes, exception_handlers={HTTPException: self._unknown})

    def _guarded(
        self, answer: Callable[[Request], Awaitable[Response]]
    ) -> Callable[[Request], Awaitable[Response]]:
        """Return an endpoint that reports every refusal as JSON."""

        async def endpoint(request: Request) -> Response:
            try:
                if (refusal := self._access.refusal(request)) is not None:
                    raise refusal
                return await answer(request)
            except UploadError as error:
                return self._refused(error.status, str(error))
            except MemoryError:
                return self._refused(503, "out of memory for this request")
            except ClientDisconnect:
                return self._refused(400, "the upload broke off")
            except Exception:
                logger.exception("a request failed")
                return self._refused(500, "the model failed: the server's log has the reason")

        return endpoint

    async def _page(self, request: Request) -> Response:
        return HTMLResponse(self._html, headers=self._headers)

    async def _run_card(self, request: Request) -> Response:
        return JSONResponse(self._card, headers=self._headers)

    async def _predict(self, request: Request) -> Response:
        top_k, show = self._query(request)
        if self._waiting >= MAX_WAITING:
            raise UploadError(503, f"{MAX_WAITING} requests are waiting: send it again later")
        self._waiting += 1
        try:
            data = await _body(request)
            work = partial(self._answerer, data, top_k, show)
            row = await asyncio.get_running_loop().run_in_executor(self._worker, work)
        finally:
            self._waiting -= 1
        return JSONResponse(row, headers=self._headers)

    def _query(self, request: Request) -> tuple[int | None, bool]:
        top_k = request.query_params.get("top_k")
        if top_k is not None and not _TOP_K.fullmatch(top_k):
            raise UploadError(422, f"top_k is {top_k!r}, not a number from 1 on")
        return int(top_k) if top_k else None, request.query_params.get("show") == "true"

    def _refused(self, status: int, message: str) -> Response:
        more = {"Retry-After": "1"} if status == 503 else {}
        return JSONResponse({"error": message}, status, headers={**self._headers, **more})

    async def _unknown(self, request: Request, error: Exception) -> Response:
        status = error.status_code if isinstance(error, HTTPException) else 500
        return self._refused(status, "there are: GET /, GET /card, POST /predict")


def _name(host: str) -> str | None:
    """Return the name in a Host header without the port, which a tunnel may have changed."""
    try:
        return urlsplit(f"//{host}").hostname
    except ValueError:
        return None


async def _body(request: Request) -> bytes:
    """Return the upload. Raises UploadError for one too large, too slow or of several parts."""
    kind = request.headers.get("content-type", "")
    if kind.startswith("multipart/"):
        raise UploadError(415, "send the file itself: curl --data-binary @FILE")
    too_large = UploadError(413, f"more than {MAX_BYTES:,} bytes")
    announced = int(request.headers.get("content-length") or 0)
    if announced > MAX_BYTES and (announced > _DRAINED or request.headers.get("expect")):
        raise too_large
    data, size = bytearray(), 0
    try:
        async with asyncio.timeout(_READ_SECONDS):
            async for chunk in request.stream():
                size += len(chunk)
                if size <= MAX_BYTES:
                    data += chunk
                elif size > _DRAINED:
                    break
                else:  # read on: a client that is cut off while sending does not read the answer
                    data.clear()
    except TimeoutError:
        raise UploadError(408, f"the upload took longer than {_READ_SECONDS} s") from None
    if size > MAX_BYTES:
        raise too_large
    return bytes(data)


def _headers(html: str) -> dict[str, str]:
    """Return the headers of every answer: only the page's own script and requests are allowed."""
    found = re.search(r"<script>(.*?)</script>", html, re.DOTALL)
    assert found is not None
    digest = b64encode(sha256(found[1].encode()).digest()).decode()
    return {
        "Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'; "
        f"script-src 'sha256-{digest}'; img-src data: blob:; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
        "Referrer-Policy": "no-referrer",
        "X-Content-Type-Options": "nosniff",
        "Cache-Control": "no-store",
    }
