"""What a callback says when it cannot do what its options ask."""

from conf.errors import ConfigError


class CallbackError(ConfigError, ValueError):
    """An option of a callback that does not fit it, or the run."""
