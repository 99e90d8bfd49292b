"""What a model can be trained for."""
