"""Numba kernels for the CPU; importing this package plugs them into the ops.

A file of kernels is named like the file in `xtrain/engine/ops` that declares their ops; the other
files are what kernels are made of.
"""

import hashlib
import importlib
import os
import pkgutil
from pathlib import Path

import numba

from xtrain.engine import chunks, ops, scalar


def _load_kernels() -> None:
    """Import the kernels, with machine code cached in a folder named by all of their sources.

    Numba renews a cached function when its own file changes, not when a file that it compiles in
    does, so a change of `tile.py` would keep running the old code. An installed package that cannot
    be written to keeps Numba's own cache folder: its files only change together.
    """
    here = Path(__file__).parent
    before = numba.config.CACHE_DIR
    if not before and os.access(here, os.W_OK):
        compiled_in = [Path(module.__file__) for module in (scalar, chunks)]
        sources = [*sorted(here.glob("*.py")), *compiled_in]
        digest = hashlib.sha256(b"".join(path.read_bytes() for path in sources)).hexdigest()
        numba.config.CACHE_DIR = str(here / "__pycache__" / f"numba-{digest[:12]}")
    for module in pkgutil.iter_modules(ops.__path__):
        if (here / f"{module.name}.py").exists():
            importlib.import_module(f"{__name__}.{module.name}")
    numba.config.CACHE_DIR = before


_load_kernels()
