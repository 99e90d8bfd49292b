"""By which name a metric is known where it counts."""


def epoch_metric(name: str) -> str:
    """Return the name by which a metric is known of a whole epoch: `train/epoch_loss` of a loss.

    `train/loss` itself is the mean since the last log line, which says little of an epoch.
    """
    stage, slash, metric = name.partition("/")
    whole = stage != "train" or not slash or metric.startswith("epoch_")
    return name if whole else f"train/epoch_{metric}"
