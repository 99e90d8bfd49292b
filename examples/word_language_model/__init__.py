"""A recurrent word language model with truncated backpropagation, as a project of one's own."""
