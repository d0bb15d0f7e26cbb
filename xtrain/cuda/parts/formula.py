"""Scalar arithmetic in fp32 for kernels: the engine's formulas, and functions Numba lacks.

`fp32(formula)` compiles a plain Python formula of `xtrain.engine.scalar` as a device function.
Numba would compute `1 + e` in float64, because 1 is an integer, and would fuse a * b + c into one
rounding; so constants become fp32 and every operation an instruction that rounds by itself, as
NumPy's do.
"""

import ast
import inspect
import math
from collections.abc import Callable
from typing import ClassVar

import numpy as np
from numba.types import float32

from xtrain.cuda.compile.launch import SIMULATED, device_function

LOG2_E = 1.4426950408889634

if SIMULATED:

    def exp2(x):
        """2**x, fp32."""
        return np.exp2(np.float32(x))

    def log2(x):
        """Base-2 logarithm, fp32."""
        return np.log2(np.float32(x))

    def sqrt(x):
        """The square root, correctly rounded."""
        return np.sqrt(x)

    def sigmoid(x):
        """1 / (1 + exp(-x)), fp32."""
        with np.errstate(over="ignore"):
            return np.float32(1) / (np.float32(1) + np.exp(np.float32(-x)))

    def cos(x):
        """cos x, fp32."""
        return np.cos(x)

    def sin(x):
        """sin x, fp32."""
        return np.sin(x)

    def multiply(a, b):
        """a * b, rounded by itself."""
        return np.float32(a * b)

    def subtract(a, b):
        """a - b, rounded by itself."""
        return np.float32(a - b)

    def divide(a, b):
        """a / b, correctly rounded."""
        return np.float32(a / b)

else:
    from numba.cuda import libdevice

    @device_function
    def exp2(x):
        """2**x, fp32: one instruction, relative error 2**-22."""
        return libdevice.exp2f(x)

    @device_function
    def log2(x):
        """Base-2 logarithm, fp32, error one unit in the last place."""
        return libdevice.log2f(x)

    @device_function
    def sqrt(x):
        """The square root, correctly rounded."""
        return math.sqrt(x)

    @device_function
    def sigmoid(x):
        """1 / (1 + exp(-x)), fp32, error 2**-22; exp may overflow to infinity, which gives 0."""
        return libdevice.fast_fdividef(float32(1), float32(1) + math.exp(-x))

    @device_function
    def cos(x):
        """cos x, fp32, accurate for every x."""
        return math.cos(x)

    @device_function
    def sin(x):
        """sin x, fp32, accurate for every x."""
        return math.sin(x)

    @device_function
    def multiply(a, b):
        """a * b, rounded by itself."""
        return libdevice.fmul_rn(a, b)

    @device_function
    def subtract(a, b):
        """a - b, rounded by itself."""
        return libdevice.fsub_rn(a, b)

    @device_function
    def divide(a, b):
        """a / b, correctly rounded."""
        return libdevice.fdiv_rn(a, b)


def fp32(formula: Callable) -> Callable:
    """A formula as a device function of fp32 that rounds after every operation."""
    if SIMULATED:
        return formula  # NumPy scalars round after every operation
    tree = _Rewrite().visit(ast.parse(inspect.getsource(formula)))
    names = {**formula.__globals__, "float32": float32, "libdevice": libdevice}
    code = compile(ast.fix_missing_locations(tree), inspect.getfile(formula), "exec")
    exec(code, names)
    return device_function(names[formula.__name__])


class _Rewrite(ast.NodeTransformer):
    ROUNDED: ClassVar = {
        ast.Add: "fadd_rn",
        ast.Sub: "fsub_rn",
        ast.Mult: "fmul_rn",
        ast.Div: "fdiv_rn",
    }

    def visit_Constant(self, node):
        if not isinstance(node.value, int | float):
            return node
        return ast.Call(ast.Name("float32", ast.Load()), [node], [])

    def visit_BinOp(self, node):
        node = self.generic_visit(node)
        name = ast.Attribute(
            ast.Name("libdevice", ast.Load()), self.ROUNDED[type(node.op)], ast.Load()
        )
        return ast.Call(name, [node.left, node.right], [])
