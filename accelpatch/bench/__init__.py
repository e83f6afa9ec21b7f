"""Measurements: timing, memory read speed, and generate() before and after a patch."""
