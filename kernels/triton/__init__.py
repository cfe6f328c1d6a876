"""Triton kernels for CUDA devices, one family for each file.

The launchers have the names and signatures of their reference implementations. `kernels.gpu` imports a family when a
CUDA device first uses it, so that a CPU needs no Triton; `support` needs torch only. A family lists, in `CASES`, the
configurations that are compiled ahead of time and whose resources are recorded.
"""

import os

# The kernels' bits depend on fused multiply-add, and Triton is about to change its default: set before its import.
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")
