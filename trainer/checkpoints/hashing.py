"""Hash a file while it is written, in one pass."""

import hashlib
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import Any, BinaryIO, Self

_LARGE = 1 << 17  # bytes; for smaller buffers a second thread costs more than it saves


class HashingFile:
    """Forward writes to `file`; keep the sha256, the size and the first error.

    Large buffers are hashed on a second thread while they are written: both release the GIL.
    """

    def __init__(self, file: BinaryIO) -> None:
        self.size = 0
        self.error: OSError | None = None  # torch.save reports it as a RuntimeError of its own
        self._file = file
        self._hash = hashlib.sha256()
        self._thread = ThreadPoolExecutor(1)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._thread.shutdown()

    def write(self, data: Any) -> int:
        """Write `data`; the caller may reuse its memory afterwards."""
        content = memoryview(data)
        hashed = self._thread.submit(self._hash.update, content) if len(content) > _LARGE else None
        try:
            self._file.write(content)
        except OSError as error:
            self.error = self.error or error
            raise
        finally:
            if hashed is not None:
                hashed.result()
        if hashed is None:
            self._hash.update(content)
        self.size += len(content)
        return len(content)

    def flush(self) -> None:
        """Do nothing: the owner of the file flushes it once at the end."""

    def hexdigest(self) -> str:
        """Return the sha256 of all that was written."""
        return self._hash.hexdigest()
