"""Every configuration of every kernel that is compiled ahead of time: one line for each family."""

from kernels.triton import kv_write
from kernels.triton.aot import Case

CASES: tuple[Case, ...] = (*kv_write.CASES,)
