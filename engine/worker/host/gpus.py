"""Whether this machine may have a GPU that can be computed on, without a second of importing torch."""

import importlib.util
import runpy
from pathlib import Path

from sluice_server.engine.errors import Code, ServiceError

# Of drivers: NVIDIA's, that of Windows below Linux, AMD's, and those of NVIDIA's boards with a GPU on the chip.
DRIVERS = tuple(map(Path, ("/dev/nvidiactl", "/dev/dxg", "/dev/kfd", "/dev/nvhost-ctrl", "/dev/nvmap")))


def may_have_gpu() -> bool:
    """Returns False where torch could not use a GPU for sure: there is no driver's file, or the torch that is installed
    knows none."""
    return any(path.exists() for path in DRIVERS) and not is_torch_for_cpu()


def is_torch_for_cpu() -> bool:
    """Whether the torch that is installed knows no GPU. It is not imported for that."""
    found = importlib.util.find_spec("torch")
    if found is None or found.origin is None:
        return False
    about = runpy.run_path(str(Path(found.origin).with_name("version.py")))
    return not any(about.get(name) for name in ("cuda", "hip", "xpu"))


def no_gpu() -> ServiceError:
    """Returns the error for `--device cuda` where it cannot be used."""
    text = "--device cuda: no CUDA device is usable here; use --device cpu, or check driver and torch build"
    return ServiceError(Code.FAILED_PRECONDITION, "INVALID_SETTING", text)
