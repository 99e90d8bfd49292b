"""A variational autoencoder of digits (Kingma and Welling, 2013)."""
