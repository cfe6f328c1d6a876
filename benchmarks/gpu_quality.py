"""What each number format costs in quality on one GPU: a published model on news, beside transformers in float32.

    python -m benchmarks.gpu_quality [--windows 16] [--only "int8;int4"] [--out DIR]

The same windows, reference and figures as `benchmarks.cpu.quality`, by the kernels of a GPU. Model and text are made as
`benchmarks.real_model` says, which needs their packages once.
"""

import argparse
import sys
import tempfile
from pathlib import Path

import torch

from benchmarks import real_model
from benchmarks.cpu.divergence import compare
from benchmarks.cpu.quality import WINDOW, Format, logits_of, rounded, write_reference
from benchmarks.gpu_clock import about_gpu
from benchmarks.machine import save

HALF, FP8 = torch.bfloat16, torch.float8_e4m3fn
FORMATS = {
    "bfloat16": Format(HALF, cache=HALF),
    "bfloat16, int8 cache": Format(HALF, cache=torch.int8),
    "bfloat16, fp8 cache": Format(HALF, cache=FP8),
    "int8": Format(HALF, "int8", HALF),
    "int4": Format(HALF, "int4", HALF),
    "int4, calibrated": Format(HALF, "int4", HALF, is_calibrated=True),
    "int4, as published": Format(HALF, "int4", HALF, "published"),
    "w8a8, int8 cache": Format(HALF, "w8a8", torch.int8),
    "fp8, fp8 cache": Format(HALF, "fp8", FP8),
}


def main() -> int:
    """Measures every format, keeping the table after each; returns 1 if one failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--windows", type=int, default=16)
    parser.add_argument("--only", default="", help="formats, separated by semicolons; the table is then not written")
    parser.add_argument("--out", type=Path, help="where the table is written; benchmarks/results by default")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("no CUDA device here: this is measured on one")
    device, table, failed = torch.device("cuda"), {}, 0
    windows = real_model.windows(options.windows, WINDOW)
    about = {**about_gpu(), "model": real_model.PACKAGES["model"][0], "windows": len(windows), "tokens_each": WINDOW}
    with tempfile.TemporaryDirectory() as scratch:
        expected = list(write_reference(real_model.checkpoint(), windows, Path(scratch, "reference.npy"), device))
        for name in options.only.split(";") if options.only else FORMATS:
            form = FORMATS[name]
            folder = real_model.checkpoint(form.variant)
            try:
                table[name] = rounded(compare(windows, logits_of(folder, form, windows, device), expected))
            except Exception as error:  # of one format: it is reported, and the others are measured
                print(f"failed: {name}: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
                failed = 1
                continue
            print(name, table[name], flush=True)
            if not options.only:  # after each: a run that is stopped keeps what it has
                save("gpu_quality", "python -m benchmarks.gpu_quality", {**about, "by_format": table}, options.out)
    return failed


if __name__ == "__main__":
    sys.exit(main())
