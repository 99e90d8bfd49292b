"""From `optimizer` to torch optimizers, their parameter groups and their state."""
