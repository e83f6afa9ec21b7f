"""What is known of model families, and where models come from."""
