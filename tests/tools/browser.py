"""Drive a headless Chromium through its debugging pipe: no driver and no further package."""

import base64
import json
import os
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome")
# It refuses to run as root but without a sandbox. The pipe: JSON on file 3 and 4, each message
# followed by a zero byte.
OPTIONS = """--headless=new --no-sandbox --disable-gpu --disable-dev-shm-usage --no-first-run
--disable-background-networking --disable-component-update --remote-debugging-pipe"""
# What is in the shadow trees of web components no selector of the document finds.
NODES = """function* nodes(node) {
    yield node;
    if (node.shadowRoot) yield* nodes(node.shadowRoot);
    for (const child of node.childNodes) yield* nodes(child);
}"""


def every(selector: str, value: str, within: str = "true") -> str:
    """Return an expression: the values of elements `e`, those in shadow trees included.

    Of all that match the selector and are somewhere within an element `e` for which that is true.
    """
    return f"""(() => {{
        {NODES}
        const outer = [...nodes(document)].filter(e => e.localName && {within});
        const inner = outer.flatMap(e => [...nodes(e)]);
        const found = new Set(inner.filter(e => e.matches?.({json.dumps(selector)})));
        return [...found].map(e => {value});
    }})()"""


TEXT = f"""(() => {{
    {NODES}
    const seen = n => n.nodeType === 3 && (n.parentElement?.checkVisibility() ?? true);
    const texts = [...nodes(document)].filter(seen).map(n => n.textContent.trim());
    return texts.filter(Boolean).join("\\n");
}})()"""


def installed() -> str | None:
    """Return the path of a Chromium; None where there is none."""
    for name in NAMES:
        path = shutil.which(name)
        if path is not None:
            return path
    return None


class Browser:
    """One page. `errors` are exceptions of its scripts and what its security policy refused."""

    def __init__(self, profile: Path, url: str) -> None:
        command_end, self._write = os.pipe()
        self._read, answer_end = os.pipe()
        words = OPTIONS.replace("\n", " ")
        shell = f'exec "$0" {words} --user-data-dir="$1" 3<&{command_end} 4>&{answer_end}'
        self._process = subprocess.Popen(
            ["bash", "-c", shell, str(installed()), str(profile)],
            pass_fds=(command_end, answer_end),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(command_end)
        os.close(answer_end)
        self._buffer = b""
        self._number = 0
        self._session: str | None = None
        self.errors: list[str] = []
        target = self.ask("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.ask("Target.attachToTarget", targetId=target, flatten=True)[
            "sessionId"
        ]
        for domain in ("Runtime", "Page", "Log", "DOM"):
            self.ask(f"{domain}.enable")
        self.ask("Page.navigate", url=url)

    def __exit__(self, *_: object) -> None:
        self._session = None
        self.ask("Browser.close")
        self._process.wait(30)
        os.close(self._write)
        os.close(self._read)

    def ask(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Send a command of the DevTools protocol and return its result."""
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next()
            if answer.get("id") == self._number:
                assert "error" not in answer, answer
                return dict(answer["result"])

    def value(self, expression: str) -> Any:
        """Return the value of an expression in the page."""
        found = self.ask("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def until(self, expression: str, seconds: float = 90) -> Any:
        """Return the value of an expression, a plain one, once it is something."""
        deadline = time.monotonic() + seconds
        while True:
            value = self.value(expression)
            if value:
                return value
            if time.monotonic() > deadline:
                page = self.value(TEXT)
                raise AssertionError(f"waited in vain for {expression}: {self.errors}, on {page}")
            time.sleep(0.01)

    def shows(self, *texts: str) -> str:
        """Wait until all these texts can be seen, and return all that can be, a piece a line."""
        self.until(f"(page => {json.dumps(texts)}.every(t => page.includes(t)))({TEXT})")
        return str(self.value(TEXT))

    def resize(self, width: int, height: int) -> None:
        """Give the page another size, in pixels."""
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.ask("Emulation.setDeviceMetricsOverride", **size)

    def screenshot(self, path: Path) -> None:
        """Write what is seen, as a PNG."""
        path.write_bytes(base64.b64decode(self.ask("Page.captureScreenshot")["data"]))

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            batch_slice = os.read(self._read, 1 << 16)
            assert batch_slice, "the browser ended"
            self._buffer += batch_slice
        message, _, self._buffer = self._buffer.partition(b"\0")
        answer: dict[str, Any] = json.loads(message)
        if answer.get("method") == "Runtime.exceptionThrown":
            self.errors.append(json.dumps(answer["params"]))
        entry = answer.get("params", {}).get("entry", {})
        if answer.get("method") == "Log.entryAdded" and entry.get("source") == "security":
            self.errors.append(entry["text"])
        return answer
