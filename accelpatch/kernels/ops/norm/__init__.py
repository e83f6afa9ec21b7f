"""Norms, and what is computed with them in one launch."""
