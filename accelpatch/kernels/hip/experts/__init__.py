"""Experts for few tokens: device sources and their binding."""
