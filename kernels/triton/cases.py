"""Every configuration of every kernel that is compiled ahead of time: one line for each family."""

from kernels.triton import attention_cases, kv_write
from kernels.triton.aot import Case

CASES: tuple[Case, ...] = (
    *attention_cases.CASES,
    *kv_write.CASES,
)
