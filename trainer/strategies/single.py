"""One process on one device."""

from collections.abc import Iterable
from typing import Any

from regimen.conf.errors import Problem, collect_problems
from regimen.trainer.device import device_count
from regimen.trainer.errors import ModelError
from regimen.trainer.strategies.strategy import Devices, Strategy, first_device


class Single(Strategy):
    """Train on one device; `devices` may be a list with its number.

    Raises ModelError if this machine does not have it.
    """

    def __init__(self, *, accelerator: str = "auto", devices: Devices = "auto") -> None:
        number = devices if isinstance(devices, int | str) else len(devices)
        if number not in (0, 1, "auto"):  # of the class of Regimen the schema has looked at it
            raise ModelError(
                "strategy.devices",
                f"{type(self).__name__} trains on one device, not on {devices}",
                "strategy=ddp, fsdp or dp take several",
            )
        device = first_device(devices, accelerator)
        count = device_count(device.type)
        if (
            device.index is not None
            and not isinstance(devices, int | str)
            and device.index >= count
        ):
            raise ModelError(
                "strategy.devices",
                f"this machine has {count} of {device.type}, numbered from 0: no {device.index}",
            )
        super().__init__(device)

    @classmethod
    def problems(cls, **arguments: Any) -> Iterable[Problem]:
        """Return whether the device exists."""
        found: list[Problem] = []
        with collect_problems(found):
            cls(**arguments)
        return found
