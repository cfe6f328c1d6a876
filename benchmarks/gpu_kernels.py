"""Compares the kernels other than attention on one GPU with torch's equivalents and with the roofline.

    python -m benchmarks.gpu_kernels [--parts sample,norm,write,silu,linear,row,experts,adapters] [--fresh]
        [--seconds N] [--out DIR] [--dry-run]

Results are kept after each case: a run that was stopped goes on where it was, --fresh begins again. No figure is taken
of a kernel that disagrees with torch.
"""

import functools
import itertools
import sys
from collections.abc import Iterable, Sequence

from benchmarks import gpu_cases, gpu_products
from benchmarks.gpu_cases import Case, Sizes, disagreement
from benchmarks.gpu_command import Ground, asked
from benchmarks.gpu_results import Row

PARTS = ("sample", "norm", "write", "silu", "linear", "row", "experts", "adapters")
# Of a dry run: every kernel, in few tiles.
DRY = Sizes((1,), 300, (5,), 96, 4, 2, 32, 4, (3,), (128,), (5,), (4,), 2, 32, 16)


def all_cases(sizes: Sizes, parts: Sequence[str], *, has_fp8: bool) -> list[Case]:
    """The cases of these parts, on a GPU with or without float8."""
    found: Iterable[Case] = itertools.chain(gpu_cases.cases(sizes), gpu_products.cases(sizes))
    return [case for case in found if case.part in parts and (has_fp8 or not case.needs_fp8)]


def measure(case: Case, ground: Ground) -> Row:
    """One row of results. Raises ValueError if ours and torch's differ."""
    work, peaks = case.make(ground.at), ground.peaks
    off = disagreement(work)
    if not off <= work.tolerance:  # NaN, too
        raise ValueError(f"differs from torch by {off:.3g} of the largest number, allowed {work.tolerance:.3g}")
    ours, theirs = (ground.clock(call) for call in (work.ours, work.torch))
    least = peaks.least_seconds(work.num_bytes, work.flops, work.size)
    rates: Row = {"gb_s": work.num_bytes / ours / 1e9}
    if work.flops:
        rates["tflop_s"] = work.flops / ours / 1e12
    return {
        "part": case.part,
        "group": case.group,
        "size": case.size,
        "us": ours * 1e6,
        "torch_us": theirs * 1e6,
        "over_torch": theirs / ours,
        **rates,
        "of_roofline": least / ours,
        "torch_of_roofline": least / theirs,
        "of_copy": work.num_bytes / ours / ground.copied,
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures what has no result yet, and reports the number of failures."""
    given = asked("gpu_kernels", __doc__, PARTS, arguments)
    ground = given.ground
    chosen = all_cases(DRY if ground.is_dry else Sizes(), given.parts, has_fp8=ground.has_fp8)
    return given.run([(case.key, functools.partial(measure, case, ground)) for case in chosen])


if __name__ == "__main__":
    sys.exit(main())
