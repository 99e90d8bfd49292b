"""What is typed, what is answered, and how a command ends."""
