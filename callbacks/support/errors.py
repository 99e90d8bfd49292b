"""The error of a callback with invalid options."""

from conf.errors import ConfigError


class CallbackError(ConfigError, ValueError):
    """An option of a callback is invalid, or does not fit the run."""
