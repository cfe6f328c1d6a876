"""What holds for every test, before anything is imported.

Triton kernels are interpreted in this process, unless a GPU is to run them (`make test-gpu` says so): settled before
anybody imports Triton, which transformers does. And SIGINT is heard: a shell starts what it puts into the background
deaf to it, and what the tests start would be so too.
"""

import os
import signal

os.environ.setdefault("TRITON_INTERPRET", "1")
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")

os.environ.pop("XDG_RUNTIME_DIR", None)  # what services keep in a test's TMPDIR is looked for there

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
