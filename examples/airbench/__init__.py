"""CIFAR-10 in a few epochs, after Jordan's airbench (2024): a network, a callback, and YAML."""
