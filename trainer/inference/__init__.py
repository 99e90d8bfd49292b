"""Use of a finished run: the facts about its data, its model, and predictions for new data."""
