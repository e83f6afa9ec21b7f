"""Passes over a program, one a file: each takes the blocks and changes them in place, or says what is wrong."""
