"""The modules of a model and its cost in FLOPs and memory, before it is trained."""
