"""What the checkpoint callback is made of: when it saves, and which of the saved is the best."""
