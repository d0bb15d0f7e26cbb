"""Measurements of kernels in Numba's simulator, which is chosen when Numba is imported: in a child.

simulated("matmul")             what gates.instruments.simulated_kernels measures, by name
with spoilt("..."): ...         inside, the child runs these lines of Python first
"""

import json
from unittest import mock

from gates.instruments.child import last_line, run_python

SPOILT = ""


def simulated(kernel: str) -> dict[str, float]:
    """The values of one measurement; raises RuntimeError with the child's last line."""
    lines = (
        "from gates.instruments import simulated_kernels",
        SPOILT,
        f"raise SystemExit(simulated_kernels.main([{kernel!r}]))",
    )
    result = run_python("-c", "\n".join(lines), NUMBA_ENABLE_CUDASIM="1")
    if result.returncode:
        raise RuntimeError(f"the simulator failed: {last_line(result.stderr)}")
    return json.loads(result.stdout)


def spoilt(lines: str):
    """Lines for a defect; `simulated_kernels` is imported."""
    return mock.patch.dict(globals(), SPOILT=lines)
