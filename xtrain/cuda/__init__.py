"""CUDA kernels, and the device that runs them."""
