"""States which models the GPU kernels support. Checked once at start, so that no request fails for it. Numbers only."""

import torch

LEAST_CAPABILITY = 80  # the first with bfloat16 mma and asynchronous copies
HEAD_DIMS = range(64, 257, 16)
MAX_GROUP = 64
MAX_BLOCK = 128
FP8_SINCE = 89  # least compute capability with products and conversions of float8
DEPENDENT_SINCE = 90  # least compute capability whose kernels can begin while the one before ends (`dependent`)
MAX_INPUTS = 32_768  # elements of a row that is rounded to 8 bits: a program keeps it in registers
DTYPES = (torch.float16, torch.bfloat16)  # attention's tiles do not fit into registers in float32


def unsupported(capability: int, dtype: torch.dtype, dim: int, group: int, block_size: int) -> str | None:
    """Returns which of these the kernels do not support, and what they support; None if they support all.

    The caller completes the text with "supported", as in "head size 40: multiples of 16 from 64 to 256 are".

    Args:
        capability: the GPU's compute capability, as 90 for 9.0.
        dtype: of weights and cache.
        dim: head size.
        group: query heads of a kv head.
        block_size: tokens of a cache block.
    """
    if capability < LEAST_CAPABILITY:
        return f"a GPU of compute capability {capability / 10}: {LEAST_CAPABILITY / 10} or newer (A100, H100) is"
    if dtype not in DTYPES:
        return f"{dtype}: {', '.join(str(one).removeprefix('torch.') for one in DTYPES)} are"
    if dim not in HEAD_DIMS:
        return f"head size {dim}: multiples of 16 from {HEAD_DIMS[0]} to {HEAD_DIMS[-1]} are"
    if group > MAX_GROUP:
        return f"{group} query heads of one kv head: up to {MAX_GROUP} are"
    if not 1 <= block_size <= MAX_BLOCK:
        return f"--block-size {block_size}: 1 to {MAX_BLOCK} are"
    return None


def too_wide(inputs: int) -> str | None:
    """Returns a text like that of `unsupported` for activations rounded to 8 bits that have too many inputs, else
    None."""
    return f"rounded activations of {inputs} inputs: up to {MAX_INPUTS} are" if inputs > MAX_INPUTS else None
