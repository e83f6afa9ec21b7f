"""Kernels against their references: the float rule, checks while a model runs, the self-test."""
