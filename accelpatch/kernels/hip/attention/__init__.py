"""Attention of decode steps: device sources and their binding."""
