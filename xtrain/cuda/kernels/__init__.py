"""Kernels of single ops; a file of the same name as the op's declaration fuses it."""
