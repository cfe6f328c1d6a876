"""Decode step and prefill of one shape, ours and peers' side by side: processes that wait while another one measures.

    python -m benchmarks.cpu.decode SHAPE [--runs 5] [--steps 24] [--only NAME,…] [--threads 2] [--clock wall]

Each run asks every contestant in turn, so that changes of the machine's speed affect all of them; a figure is the
median over runs of the run's median step. --clock cpu, with --threads 1, measures processor time instead of wall time:
use it on a machine with other users, where a barrier of two threads waits for a thread that has lost its core. Peers
have environments of their own; see `benchmarks/cpu/README.md`.
"""

import argparse
import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

from benchmarks.cpu.shapes import CACHE, checkpoint
from benchmarks.machine import end_as_asked, median, write

PEERS = Path(__file__).parent / "peers"
VENVS = CACHE.parent / "peers"
ROUNDED = ("llama.cpp q8_0", "llama.cpp q4_0")
VLLM = ("vLLM float32", "vLLM bfloat16")
CONTESTANTS = {
    "6.5M": ("float32", "bfloat16", "int8", "bare", "llama.cpp f32", "llama.cpp q8_0", "vLLM float32"),
    "61M": ("float32", "bfloat16", "int8", "int4", "llama.cpp f32", "llama.cpp bf16", *ROUNDED, *VLLM),
    "135M": ("float32", "int8", "int8+", "int4", "int4+", "llama.cpp f32", *ROUNDED),
    "474M": ("bfloat16", "int8", "int8+", "int4", "llama.cpp bf16", *ROUNDED, "vLLM bfloat16"),
}


@dataclasses.dataclass(slots=True)
class Contestant:
    """A worker process and what it has measured: milliseconds by batch, tokens a second of a prompt."""

    name: str
    process: "subprocess.Popen[str]"
    about: str = ""
    steps: dict[int, list[float]] = dataclasses.field(default_factory=dict)
    prefills: list[float] = dataclasses.field(default_factory=list)

    def ask(self, what: str, **sizes: int) -> list[float]:
        """Seconds of what was asked for."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"what": what, **sizes}) + "\n")
        self.process.stdin.flush()
        seconds: list[float] = self.answer()["seconds"]
        return seconds

    def answer(self) -> dict[str, list[float]]:
        """The next line that it writes. Raises ChildProcessError when it has ended."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise ChildProcessError(f"{self.name} ended with status {self.process.wait()}")
        found: dict[str, list[float]] = json.loads(line)
        return found


def command(name: str, shape: str) -> list[str]:
    """What starts a contestant."""
    directory = checkpoint(shape)
    kind, _, form = name.rpartition(" ")
    if kind == "llama.cpp":
        python, script = VENVS / "llama" / "bin" / "python", PEERS / "llama_cpp_worker.py"
        return [str(python), str(script), str(directory / "config.json"), form, str(CACHE / f"{shape}-{form}.gguf")]
    if kind == "vLLM":
        return [str(VENVS / "vllm" / "bin" / "python"), str(PEERS / "vllm_worker.py"), str(directory), form]
    return [sys.executable, "-m", "benchmarks.cpu.own_worker", shape, form]


def start(name: str, line: list[str], log: Path) -> Contestant | None:
    """A contestant that is ready; None, and why, if it cannot be."""
    environment = {**os.environ, "OMP_NUM_THREADS": os.environ["BENCH_THREADS"]}
    if " " in name:
        environment.pop("PYTHONPATH", None)
    if not Path(line[0]).exists():
        print(f"{name}: not installed in {VENVS}", flush=True)
        return None
    process = subprocess.Popen(
        line, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log.open("a"), text=True, env=environment
    )
    contestant = Contestant(name, process)
    try:
        contestant.about = str(contestant.answer()["about"])
    except ChildProcessError as error:
        print(f"{error}; see {log}", flush=True)
        return None
    return contestant


def measure(contestants: list[Contestant], batches: tuple[int, ...], steps: int) -> None:
    """One run of each, in turn."""
    for contestant in contestants:
        for batch in batches:
            contestant.steps.setdefault(batch, []).append(
                median(contestant.ask("decode", batch=batch, steps=steps)) * 1e3
            )
        contestant.prefills += [512 / took for took in contestant.ask("prefill", batch=1, steps=0)]


def table(contestants: list[Contestant]) -> dict[str, object]:
    """Medians over runs."""
    return {
        one.name: {
            "about": one.about,
            "step_ms": {str(batch): round(median(runs), 2) for batch, runs in one.steps.items()},
            "step_ms_runs": {str(batch): [round(run, 2) for run in runs] for batch, runs in one.steps.items()},
            "prefill_tokens_per_s": round(median(one.prefills)) if one.prefills else None,
            "prefill_runs": [round(run) for run in one.prefills],
        }
        for one in contestants
    }


def main() -> None:
    """Measure in turn and write the table."""
    end_as_asked()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shape", choices=tuple(CONTESTANTS))
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--only", default="")
    parser.add_argument("--batches", default="1,8,32")
    parser.add_argument("--threads", default="2")
    parser.add_argument("--clock", choices=("wall", "cpu"), default="wall")
    parser.add_argument("--result", help="name of the file in benchmarks/results; cpu_decode_SHAPE")
    options = parser.parse_args()
    os.environ.update(BENCH_THREADS=options.threads, BENCH_CLOCK=options.clock)
    batches = tuple(int(batch) for batch in options.batches.split(","))
    names = options.only.split(",") if options.only else CONTESTANTS[options.shape]
    known = sorted({name for names in CONTESTANTS.values() for name in names})
    if unknown := [name for name in names if name not in known]:
        parser.error(f"--only {unknown[0]!r}: there is {', '.join(known)}")
    log = CACHE / f"{options.shape}.log"
    found = [start(name, command(name, options.shape), log) for name in names]
    contestants = [one for one in found if one is not None]
    try:
        for run in range(options.runs):
            measure(contestants, batches, options.steps)
            for one in contestants:
                steps = {batch: round(runs[-1], 2) for batch, runs in one.steps.items()}
                print(f"run {run} {one.name}: {steps} ms, prefill {[round(x) for x in one.prefills[-1:]]}", flush=True)
    finally:
        for one in contestants:
            one.process.kill()
    line = f"python -m benchmarks.cpu.decode {options.shape} --runs {options.runs} --steps {options.steps}"
    line += f" --threads {options.threads} --clock {options.clock}"
    line += "" if options.batches == parser.get_default("batches") else f" --batches {options.batches}"
    line += f" --only '{options.only}'" if options.only else ""
    line += f" --result {options.result}" if options.result else ""
    about = {"runs": options.runs, "threads": int(options.threads), "clock": options.clock}
    write(options.result or f"cpu_decode_{options.shape}", line, {**about, "contestants": table(contestants)})


if __name__ == "__main__":
    main()
