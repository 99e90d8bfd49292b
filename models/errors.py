"""What can be wrong with a model that was asked for; the text names the key and the way out."""

from conf.errors import ConfigError


class ModelError(ConfigError, ValueError):
    """A model that cannot be built as it was described."""


class WeightsError(ValueError):
    """Initial weights that cannot be read or do not fit."""

    exit_code = 4
