"""The arithmetic of `data.batch_transforms`."""
