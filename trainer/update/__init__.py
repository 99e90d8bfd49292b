"""One optimizer update: batches, number formats, gradients, non-finite values."""
