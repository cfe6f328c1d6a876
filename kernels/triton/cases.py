"""All kernel configurations that are compiled ahead of time, collected from the kernel families."""

from sluice_server.kernels.triton import (
    activation,
    adjust,
    attention_cases,
    embedding,
    gemm,
    inputs,
    kv_write,
    linear4,
    linear8,
    linear8a16,
    linear16,
    low_rank,
    moe,
    norm,
    sampling,
    scores,
    speculation,
    unpacked,
)
from sluice_server.kernels.triton.aot import AotCase

CASES: tuple[AotCase, ...] = (
    *kv_write.CASES,
    *activation.CASES,
    *adjust.CASES,
    *attention_cases.CASES,
    *embedding.CASES,
    *gemm.CASES,
    *inputs.CASES,
    *linear4.CASES,
    *linear8.CASES,
    *linear8a16.CASES,
    *linear16.CASES,
    *low_rank.CASES,
    *moe.CASES,
    *norm.CASES,
    *sampling.CASES,
    *scores.CASES,
    *speculation.CASES,
    *unpacked.CASES,
)
