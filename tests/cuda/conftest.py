"""Which tests of this folder can run here: on a GPU, in Numba's simulator, or anywhere.

XTRAIN_REQUIRE=cuda makes a missing GPU a failure, on machines that are there to test one.
"""

import os

import pytest

from xtrain.cuda import runtime


def pytest_runtest_setup(item):
    if item.get_closest_marker("simulator") and os.environ.get("NUMBA_ENABLE_CUDASIM") != "1":
        pytest.skip("needs NUMBA_ENABLE_CUDASIM=1, in a process of its own")
    if item.get_closest_marker("cuda"):
        reason = runtime.why_unusable()
        if reason and os.environ.get("XTRAIN_REQUIRE") == "cuda":
            pytest.fail(f"XTRAIN_REQUIRE=cuda: {reason}")
        if reason:
            pytest.skip(reason)
