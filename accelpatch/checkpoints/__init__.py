"""Checkpoints of patched models: saved, loaded and inspected; float ones quantised while they load."""
