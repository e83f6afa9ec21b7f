"""Traces, roofline, resources of kernels and hardware counters."""
