"""Measures on the user's device what a choice between implementations depends on, and stores it."""
