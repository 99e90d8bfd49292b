"""The choices of each configuration group: listed, copied, completed."""
