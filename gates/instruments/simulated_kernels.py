"""Kernels of the first phases, run in Numba's simulator.

    python -m gates.instruments.simulated_kernels NAME

Prints one JSON line of measured errors. The simulator is chosen when Numba is imported, so callers
start a process with NUMBA_ENABLE_CUDASIM=1.
"""

import json
import sys

import numpy as np

from xtrain.cuda.compile import launch
from xtrain.cuda.kernels import matmul, vector_add
from xtrain.engine.testing import worst
from xtrain.errors import UsageError


def measure_vector_add() -> dict[str, float]:
    """n: elements. differing: how many differ from NumPy's sum in any bit."""
    source = np.random.default_rng(1)
    a, b = source.standard_normal((2, 300)).astype(np.float32)
    c = vector_add.add(np, a, b)
    return {"n": c.size, "differing": int((c.view(np.uint32) != (a + b).view(np.uint32)).sum())}


def measure_matmul() -> dict[str, float]:
    """Relative L2 error against float64 for each pair of transposes, ragged in every size."""
    found = {}
    source = np.random.default_rng(2)
    M, N, K = 67, 9, 37
    for transpose_a, transpose_b in matmul.KERNELS:
        a = source.standard_normal((K, M) if transpose_a else (M, K)).astype(np.float32)
        b = source.standard_normal((N, K) if transpose_b else (K, N)).astype(np.float32)
        c = matmul.multiply(np, a, b, transpose_a=transpose_a, transpose_b=transpose_b)
        left, right = (m.astype(np.float64) for m in (a, b))
        truth = (left.T if transpose_a else left) @ (right.T if transpose_b else right)
        name = f"error_{'t' if transpose_a else 'n'}{'t' if transpose_b else 'n'}"
        found[name] = float(np.linalg.norm(c - truth) / np.linalg.norm(truth))
    return {**found, "error": worst(found.values())}


MEASURES = {"vector_add": measure_vector_add, "matmul": measure_matmul}


def main(arguments: list[str]) -> int:
    """Run one measurement and print it; 2 on a wrong call."""
    try:
        if len(arguments) != 1 or arguments[0] not in MEASURES:
            raise UsageError(f"simulated_kernels: name one of {', '.join(MEASURES)}")
        if not launch.SIMULATED:
            raise UsageError("simulated_kernels: set NUMBA_ENABLE_CUDASIM=1")
        print(json.dumps(MEASURES[arguments[0]]()))
    except UsageError as problem:
        print(f"xtrain: {problem}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
