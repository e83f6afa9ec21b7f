"""Model families as data, and loading of models."""
