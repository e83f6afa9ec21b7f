"""Decode steps and calls captured as graphs, with the tensors that they read and write."""
