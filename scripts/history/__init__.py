"""Runs that were made: read from their directories, compared, removed."""
