"""Of which operations of `kernels.ops` a row's bits are independent of the other rows, of the chunking and of the
thread count (a test compares them): tokens then do not depend on company. Where it is not so, a near tie may flip,
nothing else.
"""

import torch

from kernels.cpu import builds, native


def is_batch_invariant(device: torch.device, head_dim: int, *, is_fixed: bool = False) -> dict[str, bool]:
    """Of each op on `device`, in any dtype and format, with heads of `head_dim`; `is_fixed`: where a GPU takes the
    slower schedules that do not follow the batch (see `Layer.fixed`)."""
    on_fixed_gpu, on_cpu = is_fixed and device.type == "cuda", device.type == "cpu"
    linear = on_fixed_gpu or on_cpu
    return {
        "linear": linear,
        "linear_normed": linear,
        "linear_gated": linear,
        "rms_norm": True,
        "soft_cap": not on_cpu or builds.is_available(),  # torch computes the end of a row otherwise
        "route": True,
        "embedding": True,
        "rotate_and_write": True,
        "sample": True,
        # Torch's decode and prefill sum in different orders.
        "paged_attention": on_fixed_gpu or (on_cpu and builds.is_available() and native.has_heads_of(head_dim)),
    }
