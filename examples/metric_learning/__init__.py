"""Metric learning: embeddings whose nearest neighbours are of the same class."""
