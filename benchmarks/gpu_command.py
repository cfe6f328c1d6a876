"""The frame of the GPU benchmarks' commands: device, options and exit.

`--dry-run` goes the same ways without a GPU: kernels are interpreted over tiny tensors on the CPU, everything is called
once, and no figure means anything. So that no command fails on its first line where a GPU is there for half an hour.
"""

import argparse
import dataclasses
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import triton

from benchmarks.gpu_cases import CaseDevice
from benchmarks.gpu_clock import Peaks, about_gpu, copy_bandwidth, peaks_of, seconds
from benchmarks.gpu_results import Results, Row

FP8_SINCE = (8, 9)  # compute capability
Clock = Callable[..., float]


@dataclasses.dataclass(frozen=True, slots=True)
class Ground:
    """The device that is measured, and its clock and limits.

    Attributes:
        at: device and the number format of activations.
        clock: seconds of a call.
        peaks, copied: what the device is specified with, and bytes a second that a copy reaches.
        is_dry: nothing is measured, really.
    """

    at: CaseDevice
    clock: Clock
    peaks: Peaks
    copied: float
    about: Row
    has_fp8: bool
    is_dry: bool = False


def gpu_ground() -> Ground:
    """The CUDA device."""
    about, copied = about_gpu(), copy_bandwidth()
    place = CaseDevice(torch.device("cuda", torch.cuda.current_device()), torch.bfloat16)
    has_fp8 = torch.cuda.get_device_capability() >= FP8_SINCE
    return Ground(place, seconds, peaks_of(str(about["gpu"]), copied), copied, about, has_fp8)


def dry_ground() -> Ground:
    """Tensors on the CPU; in float16, as the interpreter computes bfloat16 wrongly."""
    place, peaks = CaseDevice(torch.device("cpu"), torch.float16), Peaks(1e12, {2: 1e12, 1: 2e12})
    return Ground(place, once, peaks, 1e12, {"gpu": "none: a dry run"}, has_fp8=True, is_dry=True)


def once(call: Callable[[], object], *, is_recorded: bool = True) -> float:
    """Seconds of one call."""
    begun = time.perf_counter()
    call()
    return time.perf_counter() - begun


class Asked(NamedTuple):
    """The parsed command line: ground, parts, and the results file."""

    ground: Ground
    parts: list[str]
    results: Results
    seconds: float

    def run(self, todo: Sequence[tuple[str, Callable[[], Row]]]) -> int:
        """Measures what has no result yet; returns 1 if something failed."""
        self.results.measure(todo, self.seconds)
        for key in self.results.left:
            print(f"no time for: {key}", file=sys.stderr)
        for key, text in self.results.errors.items():
            print(f"failed: {key}: {text}", file=sys.stderr)
        return min(len(self.results.errors), 1)


def asked(name: str, about: str | None, parts: Sequence[str], arguments: Sequence[str] | None) -> Asked:
    """The command line of `python -m benchmarks.NAME`. Ends the process where there is no GPU and no dry run."""
    options = parsed(name, about, parts, arguments)
    ground = dry_ground() if options.dry_run else gpu_ground()
    folder = options.out or (Path(tempfile.mkdtemp(prefix="dry-run-")) if options.dry_run else None)
    results = Results(name, f"python -m benchmarks.{name}", ground.about, is_fresh=options.fresh, folder=folder)
    return Asked(ground, options.parts.split(","), results, options.seconds)


def parsed(name: str, about: str | None, parts: Sequence[str], arguments: Sequence[str] | None) -> Any:  # noqa: ANN401 # argparse's own
    """The options, checked."""
    parser = argparse.ArgumentParser(name, description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", default=",".join(parts), help="comma-separated")
    parser.add_argument("--fresh", action="store_true", help="forget what was measured before")
    parser.add_argument("--out", type=Path, help="where results are; benchmarks/results by default")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin nothing after so many")
    parser.add_argument("--dry-run", action="store_true", help="all of it, tiny, without a GPU; measures nothing")
    options = parser.parse_args(arguments)
    if unknown := set(options.parts.split(",")) - set(parts):
        parser.error(f"--parts: {', '.join(sorted(unknown))}: there are {', '.join(parts)}")
    if not options.dry_run and not torch.cuda.is_available():
        parser.error("no CUDA device here: this is measured on one; --dry-run goes through it without")
    if options.dry_run is not bool(triton.knobs.runtime.interpret):
        parser.error("set TRITON_INTERPRET=1 for a --dry-run, whose kernels are interpreted, and for nothing else")
    return options
