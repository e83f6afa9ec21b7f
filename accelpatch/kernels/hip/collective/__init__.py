"""All-reduce over several GPUs, whose kernels write into each other's memory."""
