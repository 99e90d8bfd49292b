"""Networks, and adapters to those of torchvision, timm and transformers."""
