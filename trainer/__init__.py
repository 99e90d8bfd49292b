"""The loop, its moments, what a step computes; a room for each group of the configuration."""
