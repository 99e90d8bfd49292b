"""Denoising diffusion of digits (Ho et al., 2020)."""
