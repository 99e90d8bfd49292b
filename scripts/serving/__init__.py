"""`demo`: a run's model behind a page and a JSON address, on this machine."""
