"""The engine: it finds sites, plans, verifies, swaps and reverts, and knows no kernel and no model family."""
