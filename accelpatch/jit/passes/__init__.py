"""Passes over a program, one per file: each changes the blocks in place, or raises CompileError."""
