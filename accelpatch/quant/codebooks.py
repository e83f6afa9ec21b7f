"""The tables of 16 values of nf4 and fp4, which the kernels hold (kernels/codebooks.py)."""

from accelpatch.kernels.codebooks import CODEBOOKS

__all__ = ["CODEBOOKS"]
