"""Whether this machine can train: each check is one line, good or with its cure."""
