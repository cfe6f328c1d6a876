"""Whether a model can be served on this GPU: asked once at start, and answered in words.

Takes a model's shape and the settings that matter. Knows nothing of requests.
"""

import importlib.util

import torch

from engine.errors import Code, ServiceError
from engine.models.config import ModelConfig
from kernels.support import unsupported


def check_gpu(model: ModelConfig, dtype: torch.dtype, block_size: int, device: torch.device) -> None:
    """Raises ServiceError naming what our kernels do not take and what they do; anything but CUDA passes."""
    if device.type != "cuda":
        return
    if importlib.util.find_spec("triton") is None:
        raise _unusable("--device cuda needs Triton, which is not installed: pip install triton, or use --device cpu")
    major, minor = torch.cuda.get_device_capability(device)
    check_shape(model, dtype, block_size, 10 * major + minor)


def check_shape(model: ModelConfig, dtype: torch.dtype, block_size: int, capability: int) -> None:
    """The same for a GPU of that compute capability, 90 for 9.0."""
    group = model.num_heads // model.num_kv_heads
    reason = unsupported(capability, dtype, model.head_dim, group, block_size)
    if reason is not None:
        raise _unusable(f"--device cuda does not support {reason} supported; or use --device cpu")


def _unusable(message: str) -> ServiceError:
    return ServiceError(Code.FAILED_PRECONDITION, "INVALID_SETTING", message)
