"""What the CUDA driver, the GPU and the wheels are, and the one line that says what is missing.

Nothing here raises and nothing of CUDA is imported at load time: a machine without a GPU asks too.
"""

import importlib
import importlib.util
import shutil
import subprocess
from importlib import metadata
from pathlib import Path

PACKAGES = (
    "numpy",
    "numba",
    "numba-cuda",
    "cupy-cuda12x",
    "cupy-cuda13x",
    "nvmath-python",
    "cuda-core",
    "cuda-bindings",
    "nvidia-cublas",
    "nvidia-cublas-cu12",
)
DRIVER_FILE = Path("/proc/driver/nvidia/version")
REQUIRED = {"cupy": "CuPy", "numba_cuda": "numba-cuda", "nvmath": "nvmath-python"}
NUMPY_BELOW = (2, 5)  # numba-cuda 0.30 fails to import with NumPy 2.5, which dropped row_stack
COMPUTE_CAPABILITY = (8, 0)  # bf16 arithmetic and cp.async


def why_unusable() -> str | None:
    """One line saying why CUDA kernels cannot run here, or None when they can."""
    for module, package in REQUIRED.items():
        if importlib.util.find_spec(module) is None:
            return f"{package} is not installed (pip install 'xtrain[cuda12]' or 'xtrain[cuda13]')"
    version = metadata.version("numpy")
    if tuple(map(int, version.split(".")[:2])) >= NUMPY_BELOW:
        return f"NumPy {version} is too new for numba-cuda: install numpy<{_dotted(NUMPY_BELOW)}"
    try:
        cupy = importlib.import_module("cupy")
        driver = cupy.cuda.runtime.driverGetVersion()
        built_for = cupy.cuda.runtime.runtimeGetVersion()
    except Exception as problem:  # whatever a broken install raises, it becomes the one line
        return f"CuPy does not load: {_one_line(problem)}"
    if driver == 0:
        return "no NVIDIA driver found"
    if driver // 1000 < built_for // 1000:
        return (
            f"the NVIDIA driver supports CUDA {_cuda_version(driver)}, "
            f"this CuPy needs CUDA {built_for // 1000}"
        )
    return _why_no_device(cupy)


def _why_no_device(cupy) -> str | None:
    try:
        if cupy.cuda.runtime.getDeviceCount() == 0:
            return "no GPU found"
        capability = cupy.cuda.Device().compute_capability
        cupy.zeros(1).sum()
    except Exception as problem:
        return f"the GPU does not answer: {_one_line(problem)}"
    if (int(capability[:-1]), int(capability[-1])) < COMPUTE_CAPABILITY:
        needed = _dotted(COMPUTE_CAPABILITY)
        return f"the GPU has compute capability {capability[:-1]}.{capability[-1]}, need {needed}"
    return None


def facts() -> dict[str, object]:
    """Device, compute capability, driver, memory (bytes) and versions; `problem` if unusable."""
    found: dict[str, object] = {"versions": versions()}
    problem = why_unusable()
    if problem is not None:
        return {"problem": problem, **found}
    cupy = importlib.import_module("cupy")
    here = cupy.cuda.Device()
    properties = cupy.cuda.runtime.getDeviceProperties(here.id)
    free, total = here.mem_info
    return {
        "device": properties["name"].decode(),
        "devices": cupy.cuda.runtime.getDeviceCount(),
        "compute_capability": f"{properties['major']}.{properties['minor']}",
        "multiprocessors": properties["multiProcessorCount"],
        "memory_bytes": total,
        "memory_free_bytes": free,
        "driver": driver_version(),
        "driver_cuda": _cuda_version(cupy.cuda.runtime.driverGetVersion()),
        "runtime_cuda": _cuda_version(cupy.cuda.runtime.runtimeGetVersion()),
        **found,
    }


def driver_version() -> str | None:
    """The driver's own version, such as 580.82.07; None when nothing tells it."""
    answer = _ask_nvidia_smi("--query-gpu=driver_version")
    if answer:
        return answer[0]
    try:
        words = DRIVER_FILE.read_text().splitlines()[0].split()
    except (OSError, IndexError):
        return None
    return next((word for word in words if word[0].isdigit() and "." in word), None)


def other_processes() -> int:
    """How many processes besides this one use the current GPU; 0 where nothing tells.

    In a container their ids are those of the host, so this process is taken to be one of them.
    """
    bus_id = importlib.import_module("cupy").cuda.Device().pci_bus_id
    using = _ask_nvidia_smi("--query-compute-apps=pid", f"--id={bus_id}")
    return max(len(set(using)) - 1, 0)


def _ask_nvidia_smi(*options: str) -> list[str]:
    program = shutil.which("nvidia-smi")
    if program is None:
        return []
    command = [program, *options, "--format=csv,noheader"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return []
    found = [line.strip() for line in answer.stdout.splitlines()]
    return [line for line in found if line[:1].isdigit()] if answer.returncode == 0 else []


def versions() -> dict[str, str]:
    """Installed versions of the packages that make or run kernels."""
    found = {}
    for package in PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


def _cuda_version(number: int) -> str:
    return f"{number // 1000}.{number % 1000 // 10}"


def _dotted(numbers: tuple[int, ...]) -> str:
    return ".".join(map(str, numbers))


def _one_line(problem: Exception) -> str:
    lines = str(problem).strip().splitlines()
    return f"{type(problem).__name__}: {lines[0]}" if lines else type(problem).__name__
