"""What ``accelpatch doctor`` does beyond listing: advice on the environment, and the kernel behind a memory fault."""
