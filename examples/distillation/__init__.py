"""A small network that learns from the answers of a large one (Hinton et al., 2015)."""
