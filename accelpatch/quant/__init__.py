"""Number formats and what makes them. Tensors only: a module or a model is somebody else's matter."""

from accelpatch.quant.weight import QuantizedWeight, check_finite

__all__ = ["QuantizedWeight", "check_finite"]
