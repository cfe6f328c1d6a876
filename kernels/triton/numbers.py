"""Numbers that launchers share: powers of two, number formats and their names in Triton. Tensors and numbers only."""

import torch

NAMES = {
    torch.float32: "fp32",
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.float8_e4m3fn: "fp8e4nv",
    torch.float8_e5m2: "fp8e5",
    torch.int8: "i8",
    torch.int32: "i32",
    torch.int64: "i64",
}
INT8_LARGEST = 127.0


def next_power_of_two(num: int) -> int:
    """The least power of two ≥ num."""
    return 1 << max(0, num - 1).bit_length()


def largest(dtype: torch.dtype) -> float:
    """The largest number of a format; of int8, of those that are symmetric."""
    return float(torch.finfo(dtype).max) if dtype.is_floating_point else INT8_LARGEST


def pointer(dtype: torch.dtype) -> str:
    """Triton's name for a pointer to such numbers."""
    return f"*{NAMES[dtype]}"
