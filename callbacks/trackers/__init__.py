"""Callbacks that send a run to the trackers of others."""
