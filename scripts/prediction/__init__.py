"""`predict`: from a run and a source of samples to a table of answers."""
