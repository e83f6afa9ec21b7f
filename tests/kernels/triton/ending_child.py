"""The child of compiled_in_a_child.py: its compiler ends as its kernel says."""

from tests.kernels.triton.compiled_in_a_child import child

if __name__ == "__main__":
    child()
