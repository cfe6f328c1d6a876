"""Helpers of the launchers: powers of two, number formats and their names in Triton. Depends on torch only."""

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
    """Returns the least power of two ≥ num."""
    return 1 << max(0, num - 1).bit_length()


def largest(dtype: torch.dtype) -> float:
    """Returns the largest number of a format; for int8 that of the symmetric range."""
    return float(torch.finfo(dtype).max) if dtype.is_floating_point else INT8_LARGEST


def pointer(dtype: torch.dtype) -> str:
    """Returns Triton's name for a pointer to numbers of this dtype."""
    return f"*{NAMES[dtype]}"
