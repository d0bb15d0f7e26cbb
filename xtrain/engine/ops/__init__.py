"""The declared ops, one file each; importing this package finds and declares them all.

An op is an attribute of the package under its own name: `ops.rms_norm(x, gain, eps=1e-6)`. A file
put here needs no entry anywhere else.
"""

import importlib
import pkgutil

from xtrain.engine.op import OPS, Op

for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")
# Last, because importing a file of the name of its op binds the module.
globals().update(OPS)


def __getattr__(name: str) -> Op:
    """Only for a name that no file declared; says which there are."""
    raise AttributeError(f"no op {name}; there are {', '.join(sorted(OPS))}")
