"""A `regimen demo` that runs, requests to it, and pictures for them."""

import http.client
import io
import json
import re
from typing import Any

import numpy as np
from PIL import Image
from sklearn.datasets import load_digits


class Server:
    """A demo that runs, and requests to it."""

    def __init__(self, running: Any) -> None:
        self.running = running
        running.until(lambda: "Ctrl-C" in running.out)
        self.url: str = running.out.splitlines()[0]
        found = re.fullmatch(r"http://([^/]+):(\d+)/(?:\?token=([\w-]+))?", self.url)
        assert found is not None, self.url
        self.port, self.token = int(found[2]), found[3]

    def ask(self, path: str, body: Any = None, **headers: str) -> tuple[int, Any]:
        """Return status and JSON."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        try:
            sent = {name.replace("_", "-"): value for name, value in headers.items()}
            connection.request("GET" if body is None else "POST", path, body, sent)
            answer = connection.getresponse()
            return answer.status, json.loads(answer.read())
        finally:
            connection.close()

    def predict(self, body: Any, query: str = "", **headers: str) -> tuple[int, Any]:
        """Send a body to be answered."""
        return self.ask(f"/predict{query}", body, **headers)


def digit(number: int = 3) -> bytes:
    """Return one of scikit-learn's digits as a PNG."""
    pixels = np.round(load_digits().images[number] * 255 / 16).astype(np.uint8)
    return encoded(Image.fromarray(pixels))


def encoded(picture: Image.Image, form: str = "PNG") -> bytes:
    """Return a picture as the content of a file."""
    file = io.BytesIO()
    picture.save(file, form)
    return file.getvalue()
