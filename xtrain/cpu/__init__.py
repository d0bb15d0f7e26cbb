"""Numba and BLAS kernels for the CPU; importing this package plugs them into the ops."""
