"""What a run does beside training: one file a callback."""
