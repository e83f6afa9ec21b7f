"""How a patched model runs: captured and native decode steps, fused layers, and generate()."""
