"""Scalar formulas, written once and compiled for the CPU and for CUDA by Numba.

Plain Python functions of fp32 scalars; array references that must agree with them bit for bit
apply the same operations in the same order.
"""


def adamw_moment1(m, g, one_minus_beta1):
    return m + (g - m) * one_minus_beta1


def adamw_moment2(v, g, beta2, one_minus_beta2):
    return v * beta2 + (g * g) * one_minus_beta2


def adamw_weight(p, m, root_v, shrink, step_size, sqrt_bias2, eps):
    """p * shrink - step_size * m / (root_v / sqrt_bias2 + eps), root_v = sqrt(v)."""
    return p * shrink - step_size * (m / (root_v / sqrt_bias2 + eps))
