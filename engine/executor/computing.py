"""Describes what an engine computes with: device, number formats, kernels, threads, allocator; for logs and clients.

A plain value, made when the engine is built, and again when the number of threads changes. It is sent to the gateways
unchanged.
"""

import dataclasses


@dataclasses.dataclass(frozen=True, slots=True)
class Computing:
    """What one engine computes with.

    Attributes:
        device: "cpu" or "cuda".
        mode: "native" with sluice's own compiled kernels; "eager" with torch's operators alone.
        kernels: what multiplies weights: the instruction set of sluice's kernels, "oneDNN", or "torch".
        instruction_set: the widest of the CPU that sluice's kernels support, v4_amx to v3; empty for none or on CUDA.
        dtype: number format of the computation.
        quantization: int8 or int4 if weights are rounded, w8a8 or fp8 if activations are, too; awq, gptq or fp8 if the
            checkpoint is stored so; else empty.
        cache_dtype: number format of keys and values.
        num_parameters: parameters of the model.
        threads: number of compute threads; 0 on CUDA.
        threads_because: what decided their number.
        allocator: the memory allocator: "glibc 2.36", "jemalloc", …
        notes: hints for an operator: why something is slower than it could be.
        has_fixed_cache: whether its cache cannot be resized while it serves.
    """

    device: str = ""
    mode: str = ""
    kernels: str = ""
    instruction_set: str = ""
    dtype: str = ""
    quantization: str = ""
    cache_dtype: str = ""
    num_parameters: int = 0
    threads: int = 0
    threads_because: str = ""
    allocator: str = ""
    notes: tuple[str, ...] = ()
    has_fixed_cache: bool = False


UNKNOWN = Computing()
