"""Translates torch's exceptions for device failures into the engine's own."""

import contextlib
from collections.abc import Iterator

import torch

from sluice_server.engine.errors import DeviceLost, OutOfDeviceMemory

CPU_OUT_OF_MEMORY = "can't allocate memory"  # torch raises a plain RuntimeError; only the text tells


@contextlib.contextmanager
def device_faults() -> Iterator[None]:
    """Raises OutOfDeviceMemory or DeviceLost in place of torch's own exceptions; others pass."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise OutOfDeviceMemory from error
    except torch.AcceleratorError as error:
        raise DeviceLost from error
    except RuntimeError as error:
        if CPU_OUT_OF_MEMORY in str(error):
            raise OutOfDeviceMemory from error
        raise
