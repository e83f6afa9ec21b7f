"""Attention: of prompts, of decode steps, and what is done to q and k before it."""
