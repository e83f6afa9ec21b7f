"""Recipes: what a YAML file says, checked."""

from accelpatch.recipe.recipe import bundled, dump, load, parse

__all__ = ["bundled", "dump", "load", "parse"]
