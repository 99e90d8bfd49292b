"""Data sets, their order, their transforms and their loaders."""
