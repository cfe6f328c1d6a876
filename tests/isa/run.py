"""Runs the tests whose results may differ between CPUs, under each instruction set that can be forced here.

    python -m tests.isa.run [--only WORDS] [--list]

Fails if any set does. Tests that compile emulated kernels run once, at the end.
"""

import argparse
import subprocess
import sys
import time

from tests.isa.sets import ROOT, SETS, Forced

TESTS = (
    "kernels/formats/test_row_blocks.py",
    "kernels/test_ops.py",
    "engine/models/layers/test_experts.py",
    "engine/models/layers/test_native_experts.py",
    "kernels/formats/test_quantised.py",
    "engine/models/layers/test_layer.py",
    "engine/models/encoders/test_encoder_parts.py",
    "engine/models/vision/test_tower.py",
    "kernels/formats/test_quality.py",
    "kernels/reference/test_sampling.py",
    "kernels/reference/test_scores.py",
    "kernels/triton/test_attention.py",
    "kernels/triton/test_quantised_kernels.py",
    "engine/test_invariance.py",
    "engine/test_engine_oracle.py",
    "engine/models/test_model_oracle.py",
    "engine/models/test_gemma.py",
    "engine/speculation/test_lossless.py",
)
EMULATED = "kernels/cpu/test_emulated.py"
TRITON = "kernels/triton/"  # interpreted: of the sets only OpenBLAS's concern it


def tests_of(forced: Forced) -> list[str]:
    """The test files that a set may affect."""
    is_blas = "OPENBLAS_CORETYPE" in forced.environment
    return [f"tests/{name}" for name in TESTS if name.startswith(TRITON) is is_blas]


def run(forced: Forced, tests: list[str], marks: str) -> tuple[bool, str]:
    """Whether tests pass under a set, and pytest's last line or, if they fail, its whole output."""
    words = [sys.executable, "-m", "pytest", "-p", "tests.isa.forced", "--timeout", "600", "-m", marks, *tests]
    done = subprocess.run(words, cwd=ROOT, env=forced.variables(), capture_output=True, text=True, check=False)
    text = (done.stdout + done.stderr).strip()
    return done.returncode == 0, text.rpartition("\n")[2] if done.returncode == 0 else text


def main() -> None:
    """Runs the sets and prints which passed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="sets whose name has this in it")
    parser.add_argument("--list", action="store_true", help="list the sets and run none")
    options = parser.parse_args()
    failed = []
    for forced in (one for one in SETS if options.only in one.name):
        why = forced.why_not()
        if options.list or why:
            print(f"{forced.name or 'as it is'}: {why or 'can be run'}", flush=True)
            continue
        start = time.monotonic()
        is_green, said = run(forced, tests_of(forced), "not long")
        print(
            f"{forced.name or 'as it is'}: {'green' if is_green else 'RED'}: {said} [{time.monotonic() - start:.0f} s]",
            flush=True,
        )
        failed += [] if is_green else [forced.name]
    if not options.list and not options.only:
        is_green, said = run(Forced(kernels=""), [f"tests/{EMULATED}"], "long")
        print(f"emulated VNNI, BF16, AMX: {'green' if is_green else 'RED'}: {said}", flush=True)
        failed += [] if is_green else ["emulated"]
    if failed:
        sys.exit(f"red under: {', '.join(failed)}")


if __name__ == "__main__":
    main()
