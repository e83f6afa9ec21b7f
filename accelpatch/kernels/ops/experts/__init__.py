"""Mixtures of experts: which are chosen, and what they compute."""
