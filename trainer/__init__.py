"""The training core."""
