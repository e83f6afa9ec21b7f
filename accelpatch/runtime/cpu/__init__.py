"""The native decode step of a model on a CPU."""
