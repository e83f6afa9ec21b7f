"""Number formats of weights and how to quantise to them; works on tensors and layouts, not on modules."""
