"""What there is to choose from: the files of each group, listed, copied, completed."""
