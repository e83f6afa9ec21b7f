"""Triton kernels for AMD and NVIDIA; each file is imported when its first kernel is launched."""
