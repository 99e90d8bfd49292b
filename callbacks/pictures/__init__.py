"""Callbacks that show what a network sees and answers, through the neutral door of the trainer."""
