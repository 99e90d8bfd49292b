"""What a model is trained for: tasks, their losses and metrics."""
