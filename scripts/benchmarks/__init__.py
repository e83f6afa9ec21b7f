"""What the benchmark programs of scripts/ time, and the peers beside it."""
