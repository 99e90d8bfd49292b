"""The callbacks of a run, one in each file."""
