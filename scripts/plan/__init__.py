"""The plan of a run, which `dry_run=true` prints."""
