"""Tasks: what a model is trained for, with its losses and metrics."""
