"""Checkpoint files: written whole, indexed, verified, read without running code."""
