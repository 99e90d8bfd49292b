"""Networks, and adapters to those of torchvision and timm."""
