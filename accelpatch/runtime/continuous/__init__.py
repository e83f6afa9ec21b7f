"""Continuous batching of a patched model: transformers' scheduler and pages, this package's step."""
