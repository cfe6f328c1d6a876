"""Resident memory of an engine process beyond its weights and what of its cache is in use, by number format.

    python -m benchmarks.cpu.memory SHAPE

A process each: builds the engine, computes a prompt of 512 tokens and 16 more. Weights: as packed, with the embedding
table. Pages of the checkpoint's file that were read are counted apart: they belong to the page cache and go when memory
is wanted.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path

from benchmarks.cpu.shapes import SHAPES, checkpoint, tensors_of
from benchmarks.machine import write

BYTES = {"float32": 4.0, "bfloat16": 2.0, "int8": 8.5 / 8, "int4": 5 / 8}  # with scales and minima
CACHE_BYTES = {"int8+": 1}
MIB = 1 << 20


def resident() -> dict[str, float]:
    """MiB of this process: peak, and what is its own now."""
    lines = Path("/proc/self/status").read_text().splitlines()
    fields = {line.split(":")[0]: int(line.split()[1]) / 1024 for line in lines if line.startswith(("Vm", "Rss"))}
    return {"peak": fields["VmHWM"], "own": fields["RssAnon"], "file": fields["RssFile"]}


def one(shape: str, form: str) -> dict[str, float]:
    """Of this process with an engine in it."""
    from benchmarks.cpu.own_worker import OwnEngine

    own = OwnEngine(checkpoint(shape), form)
    own.prefill()
    own.decode(1, 16)
    return resident()


def expected(shape: str, form: str) -> float:
    """MiB of weights and of the cache that 512 tokens use."""
    weights = 0.0
    name = form.rstrip("+")
    base = "bfloat16" if name == "bfloat16" else "float32"
    for key, size in tensors_of(SHAPES[shape]):
        elements = float(size[0] * (size[1] if len(size) > 1 else 1))
        if "embed_tokens" in key:
            tied = SHAPES[shape].tie_word_embeddings
            weights += elements * (BYTES[base] + (BYTES["int8" if name == "int4" else name] if tied else 0.0))
        else:
            weights += elements * BYTES["int8" if name == "int4" and key == "lm_head.weight" else name]
    about = SHAPES[shape]
    token = 2 * about.num_hidden_layers * about.num_key_value_heads * (about.head_dim + 4)
    return (weights + 1024 * token * CACHE_BYTES.get(form, BYTES[base])) / MIB


def main() -> None:
    """Measure every format and write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shape", choices=tuple(SHAPES))
    parser.add_argument("--form", default="", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.form:
        print(json.dumps(one(options.shape, options.form)))
        return
    rows: dict[str, object] = {}
    for form in ("float32", "bfloat16", "int8", "int8+", "int4"):
        command = [sys.executable, "-m", "benchmarks.cpu.memory", options.shape, "--form", form]
        found = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout)
        least = expected(options.shape, form)
        beyond = found["own"] - least
        rows[form] = {"weights_and_cache_mib": round(least), "beyond_mib": round(beyond)} | {
            f"{name}_mib": round(value) for name, value in found.items()
        }
        print(form, rows[form], flush=True)
    write(f"cpu_memory_{options.shape}", f"python -m benchmarks.cpu.memory {options.shape}", {"by_format": rows})


if __name__ == "__main__":
    main()
