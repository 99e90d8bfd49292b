"""What a model is made of and what it will cost, before it is trained."""
