"""Number formats of weights and how to quantise to them; works on tensors, not on modules."""

from accelpatch.quant.weight import QuantizedWeight, check_finite

__all__ = ["QuantizedWeight", "check_finite"]
