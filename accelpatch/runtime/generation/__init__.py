"""generate() on a patched model: the loops, the sampler, drafts."""
