"""Linear layers and embeddings: an operation a file, one for each form of the weight."""
