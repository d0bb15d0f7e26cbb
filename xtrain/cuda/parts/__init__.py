"""Device functions that kernels are built of."""
