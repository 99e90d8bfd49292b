"""A Wasserstein GAN with gradient penalty (Gulrajani et al., 2017)."""
