"""Model-agnostic meta-learning: weights from which one gradient step learns a new sine wave."""
