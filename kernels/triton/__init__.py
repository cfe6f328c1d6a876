"""Triton kernels for CUDA devices, one family a file, each with a launcher of the same name and signature as its twin.

Reached through `kernels.ops` only, which imports this package when a CUDA device is used and never before: CPU needs
no Triton. A family lists, in `CASES`, the configurations that are compiled ahead of time and whose resources are kept.
"""

import os

# Fused multiply-add is part of our numbers, and Triton is about to change its default: said here, before its import.
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")
