"""Runs everything that needs a GPU, in stages of less than ten minutes, for a machine that is rented for half an hour.

    python -m benchmarks.gpu_day STAGE... [--out DIR] [--seconds N] [--dry-run]

A stage runs its commands one after the other, each of which may fail or be missing without the others: what they said
is in DIR/STAGE.log, how they ended in DIR/STAGE.json, their figures beside these. `--dry-run` runs each of them as far
as it goes without a GPU. See benchmarks/GPU.md for the order that pays.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from benchmarks.gpu_results import Row

ROOT = Path(__file__).resolve().parent.parent
TUNED = ROOT / "kernels" / "triton" / "tuned"
GRACE_S = 15.0  # of a benchmark, to end by itself before it is ended


class Step(NamedTuple):
    """One command.

    Attributes:
        name: of it, in its stage.
        command: words behind the interpreter's name, or behind `tool`.
        is_benchmark: it knows --out, --seconds and --dry-run.
        tool: a program that must be there and runs the interpreter.
    """

    name: str
    command: tuple[str, ...]
    is_benchmark: bool = False
    tool: tuple[str, ...] = ()


def tests(*words: str) -> tuple[str, ...]:
    """pytest over files of tests/gpu."""
    return ("-m", "pytest", "-c", "tests/gpu/gpu.ini", "--rootdir", ".", "--confcutdir", ".", *words)


def bench(name: str, *words: str) -> Step:
    """A benchmark."""
    return Step("-".join((name, *words[1:])), ("-m", f"benchmarks.{name}", *words), is_benchmark=True)


def sanitized(tool: str) -> Step:
    """Every kernel, small, under compute-sanitizer."""
    program = "compute-sanitizer", "--error-exitcode", "9", "--tool", tool
    return Step(tool, tests("--timeout", "3600", "tests/gpu/test_gpu_small.py"), tool=program)


STAGES: dict[str, tuple[Step, ...]] = {
    "engines": (
        Step("small", tests("tests/gpu/test_gpu_small.py")),
        Step("engine", tests("tests/gpu/test_gpu_engine.py")),
        Step(
            "forms",
            tests(*(f"tests/gpu/test_gpu_{name}.py" for name in ("forms", "stored", "experts", "adapters", "offload"))),
        ),
    ),
    "sums": (Step("sums", tests("tests/gpu/test_gpu_sums.py")),),
    "models": (Step("models", tests("tests/gpu/test_gpu_models.py")),),
    "ranks": (Step("ranks", tests("tests/gpu/test_gpu_ranks.py")),),
    "grid": (
        Step("kernels", tests("tests/gpu/test_gpu_kernels.py")),
        Step("attention", tests("tests/gpu/test_gpu_attention.py")),
    ),
    "attention": (
        bench("gpu_attention"),
        bench("gpu_block_table"),
        Step("libraries", tests("tests/gpu/test_gpu_backends.py")),
    ),
    "kernels": (bench("gpu_kernels"),),
    "engine": (bench("gpu_engine", "--parts", "8b,0.6b,busy,mixed,8b-fp8"),),
    "throughput": (bench("gpu_engine", "--parts", "throughput"),),
    "offload": (bench("gpu_offload"),),
    "tune": (bench("gpu_tune"), bench("gpu_attention", "--fresh")),
    "memcheck": (sanitized("memcheck"),),
    "racecheck": (sanitized("racecheck"),),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the stages; returns 1 if any of their commands failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("stages", nargs="+", choices=list(STAGES), metavar="STAGE", help=", ".join(STAGES))
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "out")
    parser.add_argument("--seconds", type=float, default=540.0, help="for all stages together")
    parser.add_argument("--dry-run", action="store_true")
    options = parser.parse_args(arguments)
    options.out.mkdir(parents=True, exist_ok=True)
    end, failed = time.monotonic() + options.seconds, 0
    for name in options.stages:
        ended = run(name, options.out, end, is_dry=options.dry_run)
        failed += sum(row["ended"] not in (0, "skipped") for row in ended.values())
    for table in TUNED.glob("*.json"):
        shutil.copy(table, options.out)
    return min(failed, 1)


def run(stage: str, out: Path, end: float, *, is_dry: bool) -> dict[str, Row]:
    """How each command of a stage ended, and its duration."""
    ended: dict[str, Row] = {}
    with (out / f"{stage}.log").open("w") as log:
        for step in STAGES[stage]:
            begun, left = time.monotonic(), end - time.monotonic()
            print(f"== {stage}: {step.name}, {left:.0f} s left", flush=True)
            result = "no time" if left <= 0 else carry_out(step, out, left, log.fileno(), is_dry=is_dry)
            ended[step.name] = {"ended": result, "seconds": round(time.monotonic() - begun, 1)}
            print(f"== {stage}: {step.name} ended with {result}", flush=True)
            (out / f"{stage}.json").write_text(json.dumps(ended, indent=2) + "\n")
    print((out / f"{stage}.log").read_text()[-4000:], flush=True)
    return ended


def carry_out(step: Step, out: Path, seconds: float, log: int, *, is_dry: bool) -> object:
    """The exit status of one command, or a word that says why there is none."""
    if step.tool and shutil.which(step.tool[0]) is None:
        return "skipped" if is_dry else f"{step.tool[0]} is not here"
    words = [*step.tool, sys.executable, *step.command]
    if step.is_benchmark:
        words += [
            "--out",
            str(out),
            "--seconds",
            f"{max(1.0, seconds - GRACE_S):.0f}",
            *(["--dry-run"] if is_dry else []),
        ]
    try:
        return subprocess.run(
            words, cwd=ROOT, env=environment(step, is_dry=is_dry), stdout=log, stderr=log, timeout=seconds
        ).returncode
    except subprocess.TimeoutExpired:
        return "out of time"


def environment(step: Step, *, is_dry: bool) -> dict[str, str]:
    """The environment of a command: kernels are compiled, or in a benchmark's dry run interpreted."""
    is_interpreted = is_dry and step.is_benchmark
    more = {"TRITON_INTERPRET": "1" if is_interpreted else "0", "PYTHONUNBUFFERED": "1"}
    if step.tool:  # without torch's pool every tensor is an allocation of its own, and an access beside it is seen
        more["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"
    return {**os.environ, **more, "TRITON_DEFAULT_FP_FUSION": "1"}


if __name__ == "__main__":
    sys.exit(main())
