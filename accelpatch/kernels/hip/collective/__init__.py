"""Sums over several GPUs, in which each kernel reads and writes the others' memory."""
