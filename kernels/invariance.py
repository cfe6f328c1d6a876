"""Of which operations of `kernels.ops` a row's bits are independent of the other rows, of the chunking and of the
thread count (a test compares them): tokens then do not depend on company. Where it is not so, a near tie may flip,
nothing else.
"""

import torch

from kernels import builds, kinds


def is_batch_invariant(
    dtype: torch.dtype, device: torch.device, weights: str = "", *, is_fixed: bool = False
) -> dict[str, bool]:
    """Of each op on `device` with weights and cache of `dtype`, weights of the format `weights` if it is given;
    `is_fixed`: where a GPU takes the slower schedules that do not follow the batch (see `Layer.fixed`)."""
    on_fixed_gpu = is_fixed and device.type == "cuda"
    on_cpu = device.type == "cpu" and (dtype is torch.float32 or builds.is_available())
    # With the weight's `min_rows`. Without our own kernels, in float32 for K up to about 700.
    linear = (
        on_fixed_gpu
        or (bool(weights) and device.type == "cpu")
        or (on_cpu and (dtype is torch.float32 or not kinds.serves_onednn()))
    )
    return {
        "linear": linear,
        "linear_normed": linear,
        "linear_gated": linear,
        "rms_norm": True,
        "soft_cap": device.type != "cpu" or builds.is_available(),  # torch computes the end of a row otherwise
        "route": True,
        "embedding": True,
        "rotate_and_write": True,
        "sample": True,
        "paged_attention": on_fixed_gpu
        or (on_cpu and builds.is_available()),  # torch's decode and prefill sum in different orders
    }
