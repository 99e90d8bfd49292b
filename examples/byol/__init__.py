"""BYOL: a network learns from images without labels, by what an average of itself answers."""
