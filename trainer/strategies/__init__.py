"""The `strategy` section: the devices of a model, and how its gradients are combined."""
