"""Messages between a sweep and its fork server: one JSON object a line, over a socket."""

import json
import socket
from typing import Any


class Channel:
    """One end of a socket."""

    def __init__(self, end: socket.socket) -> None:
        self.socket = end
        self._received = b""

    def send(self, message: dict[str, Any]) -> bool:
        """Send a message; return False if the other end is closed."""
        try:
            self.socket.sendall(json.dumps(message).encode() + b"\n")
        except OSError:
            return False
        return True

    def receive(self) -> dict[str, Any] | None:
        """Wait for the next message; return None if the other end is closed."""
        while b"\n" not in self._received:
            try:
                more = self.socket.recv(1 << 16)
            except OSError:
                more = b""
            if not more:
                return None
            self._received += more
        line, self._received = self._received.split(b"\n", 1)
        message: dict[str, Any] = json.loads(line)
        return message

    @property
    def waiting(self) -> bool:
        """Return whether a complete message is buffered."""
        return b"\n" in self._received

    def close(self) -> None:
        """Close this end."""
        self.socket.close()
