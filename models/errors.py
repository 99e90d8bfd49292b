"""Errors of building a model; their text names the key and a solution."""

from conf.errors import ConfigError


class NetworkError(ConfigError, ValueError):
    """A model cannot be built from its configuration."""


class WeightsError(ValueError):
    """Initial weights cannot be read or do not match the model."""

    exit_code = 4
