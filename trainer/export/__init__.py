"""A trained model as a file that other programs load, verified against the model."""
