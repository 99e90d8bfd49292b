"""Ratings by factors with sparse gradients, as a project of one's own."""
