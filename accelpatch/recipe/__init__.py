"""Recipes: what a YAML file says, checked."""
