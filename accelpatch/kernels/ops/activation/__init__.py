"""Activations: gates, and rows in 8 bits."""
