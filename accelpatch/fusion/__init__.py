"""A whole decoder layer, and a whole model of them, as few kernels."""
