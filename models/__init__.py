"""Networks of our own and adapters to others'."""
