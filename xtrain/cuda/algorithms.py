"""Algorithms of large bf16 products, fixed by their shapes in a committed table.

cuBLAS's heuristic is a function of shape and types, but not always a good one: at the shapes of a
training step another of its algorithms is up to a fifth faster (docs/log.md). Timing them in the
run would let two runs choose differently, and with it their bits. So they were timed once, by
`xtrain-bench products --write`, and the faster ones stand in `algorithms.json`, as cuBLASLt's own
serialized form, which is good for the version and the kind of GPU that the table names. Anywhere
else, and for every other shape, cuBLAS chooses.

A product's key leaves out its number of tokens: rows of a product with weights, the summed axis of
a weight's gradient. Below LEAST_TOKENS of them (decoding, small batches) the table does not apply.
"""

import functools
import json
from pathlib import Path

import numpy as np

TABLE = Path(__file__).parent / "algorithms.json"
LEAST_TOKENS = 4096
RESULT_BYTES = 96  # cublasLtMatmulHeuristicResult_t, which begins with the algorithm
ALGORITHM_BYTES = 64
COMPUTE_32F, REAL_32F = 68, 0
TRANSPOSE_A, TRANSPOSE_B = 3, 4  # attributes of a product's description


def key(sizes, *, transpose_a: bool, transpose_b: bool, out_type: int, adds: bool) -> str | None:
    """What the table calls a product of (rows, columns, inner); None when it has few tokens."""
    rows, columns, inner = sizes
    tokens, *fixed = (inner, rows, columns) if transpose_a else (rows, columns, inner)
    if tokens < LEAST_TOKENS:
        return None
    how = f"{'t' if transpose_a else 'n'}{'t' if transpose_b else 'n'}"
    end = f"{'fp32' if out_type == REAL_32F else 'bf16'}{'+' if adds else ''}"
    return f"{how} {fixed[0]}x{fixed[1]} {end}"


@functools.cache
def table(device: str, library: int) -> dict[str, bytes]:
    """The algorithms by key for a GPU's name and a version of cuBLASLt; empty for any other."""
    found = json.loads(TABLE.read_text()) if TABLE.is_file() else {}
    if (found.get("device"), found.get("cublas_lt")) != (device, library):
        return {}
    return {name: bytes.fromhex(algorithm) for name, algorithm in found["algorithms"].items()}


class Product:
    """A product as cuBLASLt is told of it, column-major: the second operand comes first.

    second, first, target: (type, rows, columns, leading dimension) as stored, column-major.
    """

    def __init__(self, lt, second, first, target, *, transpose_second, transpose_first):
        self.lt = lt
        self.description = lt.matmul_desc_create(COMPUTE_32F, REAL_32F)
        for attribute, transpose in (
            (TRANSPOSE_A, transpose_second),
            (TRANSPOSE_B, transpose_first),
        ):
            value = np.array([transpose], np.int32)
            lt.matmul_desc_set_attribute(self.description, attribute, value.ctypes.data, 4)
        self.layouts = tuple(lt.matrix_layout_create(*each) for each in (second, first, target))

    def run(self, handle, algorithm: int, addresses, scalars, workspace, stream: int) -> None:
        """Queue it. algorithm: its address.  addresses: of the second operand, first, target.
        scalars: addresses of alpha and beta.  workspace: (address, bytes)."""
        second, first, target = addresses
        alpha, beta = scalars
        a, b, c = self.layouts
        self.lt.matmul(
            handle, self.description, alpha, second, a, first, b, beta, target, c, target, c,
            algorithm, *workspace, stream,
        )  # fmt: skip

    def candidates(self, handle, count: int, workspace_bytes: int) -> list[bytes]:
        """Up to `count` algorithms, those first that the heuristic takes for the fastest."""
        lt, made = self.lt, np.zeros(1, np.int32)
        preference = lt.matmul_preference_create()
        most = np.array([workspace_bytes], np.uint64)
        lt.matmul_preference_set_attribute(preference, 1, most.ctypes.data, 8)
        results = np.zeros(count * RESULT_BYTES, np.uint8)
        a, b, c = self.layouts
        lt.matmul_algo_get_heuristic(
            handle, self.description, a, b, c, c, preference, count,
            results.ctypes.data, made.ctypes.data,
        )  # fmt: skip
        lt.matmul_preference_destroy(preference)
        rows = results.reshape(count, RESULT_BYTES)[: made[0], :ALGORITHM_BYTES]
        return [row.tobytes() for row in rows]
