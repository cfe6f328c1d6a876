"""Every configuration of every kernel that is compiled ahead of time: one line for each family."""

from kernels.triton import adjust, kv_write, log_probs, sampling, speculation
from kernels.triton.aot import Case

CASES: tuple[Case, ...] = (
    *kv_write.CASES,
    *adjust.CASES,
    *log_probs.CASES,
    *sampling.CASES,
    *speculation.CASES,
)
