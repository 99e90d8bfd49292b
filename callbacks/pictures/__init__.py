"""Callbacks that log images, curves and texts of a run by the trainer's `log_` methods."""
