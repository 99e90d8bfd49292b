"""A run on disk: its directory, lock, status and manifest."""
