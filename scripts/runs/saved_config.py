"""The configuration in a checkpoint, which is untrusted text."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from conf.errors import ConfigError
from conf.yaml_file import plain_values
from trainer.errors import CheckpointError
from trainer.targets.renamed import with_present_targets


def saved_config(payload: Mapping[str, Any], path: Path | None) -> dict[str, Any]:
    """Return the configuration in a checkpoint. Raises CheckpointError if it is invalid."""
    where = f"{path}: " if path else ""
    try:
        values = plain_values(payload["config"], "its configuration")
    except ConfigError as error:
        raise CheckpointError(f"{where}{error.problems[0]}") from error
    if values is not None and not isinstance(values, dict):
        raise CheckpointError(f"{where}its configuration is not a mapping")
    return dict(with_present_targets(values or {}))
