"""From `lr_scheduler` to the learning rate of each step."""
