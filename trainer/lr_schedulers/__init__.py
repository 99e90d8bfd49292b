"""The `lr_scheduler` section: the learning rate of each step."""
