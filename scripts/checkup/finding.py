"""What a check says."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Finding:
    """One line: what was looked at, what was found, and what to do where that is not good."""

    name: str
    text: str
    cure: str | None = None  # None: it is good

    @property
    def good(self) -> bool:
        """Return whether there is nothing to do."""
        return self.cure is None


Check = Callable[[], Finding]


def checked(checks: dict[str, Check]) -> Iterator[Finding]:
    """Run checks in their order; one that fails itself is a finding, too."""
    for name, check in checks.items():
        try:
            yield check()
        except Exception as error:
            text = f"could not be checked: {type(error).__name__}: {error}"
            yield Finding(name, text, "report it with this line, and train without it")
