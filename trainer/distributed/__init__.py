"""Processes that train together: rendezvous, communication, stopping and failure."""
