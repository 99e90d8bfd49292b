"""Where the jobs of a sweep run: side by side on this machine, or on a cluster."""
