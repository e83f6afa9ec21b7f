"""The GEMM tuning workflow of hipBLASLt: from the log of a program to a library of kernels that were measured."""
