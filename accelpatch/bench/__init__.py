"""Measurements: time, the limit of the memory, stock generate() before and after."""
