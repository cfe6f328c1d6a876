"""Every configuration of every kernel that is compiled ahead of time: one line for each family."""

from kernels.triton import (
    activation,
    adjust,
    attention_cases,
    copy_blocks,
    embedding,
    inputs,
    kv_write,
    log_probs,
    norm,
    sampling,
    speculation,
)
from kernels.triton.aot import Case

CASES: tuple[Case, ...] = (
    *kv_write.CASES,
    *activation.CASES,
    *adjust.CASES,
    *attention_cases.CASES,
    *copy_blocks.CASES,
    *embedding.CASES,
    *inputs.CASES,
    *log_probs.CASES,
    *norm.CASES,
    *sampling.CASES,
    *speculation.CASES,
)
