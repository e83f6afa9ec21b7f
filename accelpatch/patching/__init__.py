"""The patching engine: finds sites, plans, verifies, swaps and reverts. Independent of kernels and model families."""
