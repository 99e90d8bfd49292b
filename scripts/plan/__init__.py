"""`dry_run=true`: what would be trained, on what, how, and at what cost."""
