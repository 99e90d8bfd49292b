"""One optimizer update: its loss, gradients, guard against non-finite values, and means."""
