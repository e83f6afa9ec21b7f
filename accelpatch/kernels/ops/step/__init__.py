"""A whole decode step, and what ends it."""
