"""Kernels; importing a file plugs what it holds into the ops that it serves, whatever its name."""
