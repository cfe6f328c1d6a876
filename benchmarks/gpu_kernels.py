"""Kernels other than attention on one GPU, each beside its equivalent in torch and against the roofline.

    python -m benchmarks.gpu_kernels [--parts sample,norm,write,silu,copy,linear,experts] [--fresh]

Results are kept after each case: a run that was stopped goes on where it was, --fresh begins again. No figure is taken
of a kernel that disagrees with torch.
"""

import argparse
import functools
import itertools
import sys
from collections.abc import Callable, Iterable, Sequence

import torch

from benchmarks import gpu_cases, gpu_products
from benchmarks.gpu_cases import Case, Place, Sizes, disagreement
from benchmarks.gpu_clock import Peaks, about_gpu, copy_bandwidth, peaks_of, seconds
from benchmarks.gpu_plots import draw
from benchmarks.gpu_results import Results, Row

PARTS = ("sample", "norm", "write", "silu", "copy", "linear", "experts")
FP8_SINCE = (8, 9)  # compute capability

Clock = Callable[..., float]


def all_cases(sizes: Sizes, parts: Sequence[str], *, has_fp8: bool) -> list[Case]:
    """Of these parts, on a GPU with or without float8."""
    found: Iterable[Case] = itertools.chain(gpu_cases.cases(sizes), gpu_products.cases(sizes))
    return [case for case in found if case.part in parts and (has_fp8 or not case.needs_fp8)]


def measure(case: Case, at: Place, peaks: Peaks, copied: float, clock: Clock) -> Row:
    """A row of results. Raises ValueError where ours and torch's differ."""
    work = case.make(at)
    off = disagreement(work)
    if not off <= work.tolerance:  # NaN, too
        raise ValueError(f"differs from torch by {off:.3g} of the largest number, allowed {work.tolerance:.3g}")
    ours, theirs = (clock(call, is_recorded=work.is_recorded) for call in (work.ours, work.torch))
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
        "of_copy": work.num_bytes / ours / copied,
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure what is not there yet, draw, and say how many failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", default=",".join(PARTS))
    parser.add_argument("--fresh", action="store_true")
    options = parser.parse_args(arguments)
    parts = options.parts.split(",")
    if unknown := set(parts) - set(PARTS):
        parser.error(f"--parts: {', '.join(sorted(unknown))}: there are {', '.join(PARTS)}")
    if not torch.cuda.is_available():
        parser.error("no CUDA device here: these are measured on one")
    about, copied = about_gpu(), copy_bandwidth()
    peaks = peaks_of(str(about["gpu"]), copied)
    results = Results("gpu_kernels", "python -m benchmarks.gpu_kernels", about, is_fresh=options.fresh)
    at = Place(torch.device("cuda"), torch.bfloat16)
    chosen = all_cases(Sizes(), parts, has_fp8=torch.cuda.get_device_capability() >= FP8_SINCE)
    results.measure([(case.key, functools.partial(measure, case, at, peaks, copied, seconds)) for case in chosen])
    draw("gpu_kernels", results.rows)
    for key, text in results.errors.items():
        print(f"failed: {key}: {text}", file=sys.stderr)
    return min(len(results.errors), 1)


if __name__ == "__main__":
    sys.exit(main())
