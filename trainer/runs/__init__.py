"""A run on disk: its directory, who holds it, how it ended, what it was made of."""
