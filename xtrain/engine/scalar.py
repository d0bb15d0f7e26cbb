"""Scalar formulas, written once and compiled for the CPU and for CUDA by Numba.

Plain Python functions of fp32 scalars; array references that must agree with them bit for bit
apply the same operations in the same order.
"""

import math


def silu(g):
    """g * sigmoid(g), without overflow."""
    e = math.exp(-abs(g))
    return g / (1 + e) if g >= 0 else g * e / (1 + e)


def silu_grad(g):
    """d silu(g) / dg."""
    e = math.exp(-abs(g))
    s = 1 / (1 + e) if g >= 0 else e / (1 + e)
    return s * (1 + g * (1 - s))


def adamw_moment1(m, g, one_minus_beta1):
    return m + (g - m) * one_minus_beta1


def adamw_moment2(v, g, beta2, one_minus_beta2):
    return v * beta2 + (g * g) * one_minus_beta2


def adamw_weight(p, m, root_v, shrink, step_size, sqrt_bias2, eps):
    """p * shrink - step_size * m / (root_v / sqrt_bias2 + eps), root_v = sqrt(v)."""
    return p * shrink - step_size * (m / (root_v / sqrt_bias2 + eps))
