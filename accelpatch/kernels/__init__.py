"""The operations: one file each, tensors only. `dispatch` says which implementation runs."""
