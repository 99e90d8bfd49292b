"""The `optimizer` section: torch optimizers, their parameter groups and their state."""
