"""One optimizer update: batches, number formats, gradients, and what is not finite."""
