"""The operations on tensors, a folder a family and in it an operation a file; `dispatch` chooses the implementation."""
