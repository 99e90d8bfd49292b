"""Callbacks that make a network smaller while it trains."""
