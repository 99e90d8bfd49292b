"""Loops and scripts written by hand, which benchmarks compare with."""
