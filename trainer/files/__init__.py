"""Atomic file replacement and line-based logs; does not import torch."""
