"""Compiling and launching: Numba-CUDA, its simulator, cubins on disk, CUDA C++ by NVRTC."""
