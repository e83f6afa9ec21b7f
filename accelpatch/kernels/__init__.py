"""The operations on tensors, one file each; `dispatch` chooses the implementation."""
