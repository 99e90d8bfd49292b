"""What can be wrong with a model that was asked for; the text names the key and the way out."""


class ModelError(ValueError):
    """A model that cannot be built as it was described."""

    exit_code = 2


class WeightsError(ModelError):
    """Initial weights that cannot be read or do not fit."""

    exit_code = 4
