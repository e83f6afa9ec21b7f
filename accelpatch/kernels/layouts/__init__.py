"""Weight layouts: how a weight lies in memory for the kernels that read it."""
