"""Compile the Triton kernels for an AMD GPU ahead of time, and list those that do not compile or do not fit.

`python -m tools.kernels_on_amd [--target gfx942] [--quick] [--jobs N]` needs no GPU. It exits 1 if a kernel does not
compile; one that takes more shared memory than a block has there needs smaller tiles, and is named.
"""

import argparse
import os
import sys
from concurrent.futures import ProcessPoolExecutor
from functools import partial

os.environ["TRITON_INTERPRET"] = "0"  # Triton decides at import whether it compiles or interprets kernels

import triton.language as tl
from triton.backends.compiler import GPUTarget

from sluice_server.kernels.triton import widen
from sluice_server.kernels.triton.aot import compiled
from sluice_server.kernels.triton.cases import CASES

SHARED_BYTES, WAVE = 65_536, 64  # of a block; threads that run together


def main() -> int:
    """Run the command line. Returns 1 if a kernel does not compile."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", default="gfx942", help="the architecture (default: %(default)s)")
    parser.add_argument("--quick", action="store_true", help="only the cases of make test")
    parser.add_argument("--jobs", type=int, default=1, help="processes that compile")
    arguments = parser.parse_args()
    chosen = [at for at, case in enumerate(CASES) if case.is_quick or not arguments.quick]
    with ProcessPoolExecutor(arguments.jobs) as pool:
        found = list(pool.map(partial(shared_of, arguments.target), chosen))
    failed = 0
    for at, shared in zip(chosen, found, strict=True):
        failed += isinstance(shared, str)
        if isinstance(shared, str):
            print(f"{CASES[at].name}: does not compile: {shared}")
        elif shared > SHARED_BYTES:
            print(f"{CASES[at].name}: takes {shared} bytes of shared memory; a block has {SHARED_BYTES}")
    print(f"{len(chosen) - failed} of {len(chosen)} kernels compile for {arguments.target}")
    return min(failed, 1)


def shared_of(target: str, at: int) -> int | str:
    """Bytes of shared memory that a case takes, by its index, or why it does not compile."""
    widen.CONVERTS = tl.constexpr(True)  # as where torch is AMD's
    try:
        return int(compiled(CASES[at], GPUTarget("hip", target, WAVE)).metadata.shared)
    except Exception as error:  # whatever a compiler raises
        return f"{type(error).__name__}: {error}".splitlines()[0][:200]


if __name__ == "__main__":
    sys.exit(main())
