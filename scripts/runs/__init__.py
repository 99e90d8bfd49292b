"""One run, from its configuration to its final report."""
