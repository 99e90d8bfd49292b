"""From `strategy`: where a model computes, and how its gradients are combined."""
