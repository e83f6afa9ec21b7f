"""Tables of the compile gates."""
