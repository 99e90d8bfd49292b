"""What a callback says when it cannot do what its options ask."""

from trainer.errors import RunError


class CallbackError(RunError, ValueError):
    """An option of a callback that does not fit it, or the run."""

    exit_code = 2
