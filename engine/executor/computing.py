"""What an engine computes with, as logs and clients are told: device, number formats, kernels, threads, allocator.

A value and nothing else: made when the engine is built, and anew when the number of threads changes; it travels to the
gateways as it is.
"""

import dataclasses


@dataclasses.dataclass(frozen=True, slots=True)
class Computing:
    """Attributes:
    device: "cpu" or "cuda".
    mode: "native" with kernels of our own, built ahead; "eager" with torch's operators alone.
    kernels: what multiplies weights: the instruction set of our own kernels, "oneDNN", or "torch".
    instruction_set: the widest of the CPU that our kernels know, v4_amx to v3; empty where it has none or on CUDA.
    dtype: number format that it computes in.
    quantization: int8 or int4 if weights are rounded, w8a8 or fp8 if activations are, too; awq, gptq or fp8 if they
        came so; else empty.
    cache_dtype: number format of keys and values.
    num_parameters: of the model.
    threads: that compute; 0 on CUDA.
    threads_because: what decided their number.
    allocator: what hands out memory: "glibc 2.36", "jemalloc", …
    notes: what an operator should know: why something is slower than it could be.
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


UNKNOWN = Computing()
