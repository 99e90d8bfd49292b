"""Processes that train as one: how they meet, exchange, stop and fail."""
