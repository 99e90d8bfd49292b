"""A finished run put to use: what it was given, its model, and its predictions for new data."""
