"""What the loop, an update, an evaluation and a snapshot are given: the parts of a training."""
