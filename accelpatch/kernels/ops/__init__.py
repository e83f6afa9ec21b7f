"""The operations: one a file, with its reference, its implementations and their limits."""
