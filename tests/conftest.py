"""Triton kernels are interpreted in this process, unless a GPU is to run them (`make test-gpu` says so).

It has to be settled before anybody imports Triton, which transformers does.
"""

import os

os.environ.setdefault("TRITON_INTERPRET", "1")
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")
