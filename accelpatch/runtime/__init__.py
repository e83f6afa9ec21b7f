"""What happens when a patched model runs."""
