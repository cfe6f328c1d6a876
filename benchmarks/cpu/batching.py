"""Continuous batching over static: the same engine, requests of different lengths, admitted as others end or batch by
batch.

    python -m benchmarks.cpu.batching [--shape 61M] [--form float32] [--requests 64] [--batch 16] [--runs 5]

All requests are there at the start. Static: `batch` of them are run to the end of the longest before the next ones
begin. Lengths are those of `open_load`. Both ways in turn; figures are medians of output tokens a second and of the
mean time to a request's end. BENCH_THREADS=1 BENCH_CLOCK=cpu measures processor time, for a machine with other users.
"""

import argparse
import dataclasses
import os

from benchmarks.cpu.load_lengths import sharegpt
from benchmarks.cpu.open_loop import Completion, completions
from benchmarks.cpu.own_worker import CLOCK, SETTINGS, THREADS
from benchmarks.cpu.shapes import SHAPES, checkpoint
from benchmarks.machine import end_as_asked, median, write
from sluice_server.engine.build import build_engine
from sluice_server.engine.config import EngineConfig
from sluice_server.engine.engine import Engine
from sluice_server.engine.models.config import read_config
from sluice_server.engine.models.limits import limits_of
from sluice_server.engine.request import EngineRequest, SamplingParams

WAYS = ("continuous", "static")


def make_engine(shape: str, form: str, batch: int) -> Engine:
    """One that runs so many requests at once, and finds no prefix again."""
    directory = checkpoint(shape)
    config = EngineConfig(device="cpu", max_num_seqs=batch, threads=THREADS, prefix_caching=False)
    config = dataclasses.replace(config, **SETTINGS[form])  # type: ignore[arg-type] # mixed values
    model = read_config(directory)
    return build_engine(config, model, directory, limits_of(config, model, 1 << 20)).engine


def run(engine: Engine, work: list[Completion], batch: int, way: str) -> tuple[float, float]:
    """Output tokens a second, and the mean seconds to a request's end."""
    start, ends = CLOCK(), []
    size = len(work) if way == "continuous" else batch
    for first in range(0, len(work), size):
        for at, one in enumerate(work[first : first + size], first):
            params = SamplingParams(max_tokens=one.num_tokens, temperature=0.0, ignore_eos=True)
            engine.add(EngineRequest(f"{at:032x}", tuple(one.prompt), params))
        while engine.has_work:
            num = sum(event.finish is not None for event in engine.step().sampled)
            ends += [CLOCK() - start] * num
    assert len(ends) == len(work)
    return sum(one.num_tokens for one in work) / ends[-1], sum(ends) / len(ends)


def main() -> None:
    """Measure in turn and write the table."""
    end_as_asked()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="61M", choices=tuple(SHAPES))
    parser.add_argument("--form", default="float32", choices=tuple(SETTINGS))
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--runs", type=int, default=5)
    options = parser.parse_args()
    engine = make_engine(options.shape, options.form, options.batch)
    work = completions(options.requests, sharegpt(), SHAPES[options.shape].vocab_size, seed=0)
    run(engine, work[: options.batch], options.batch, "continuous")  # warms it up
    rates: dict[str, list[float]] = {way: [] for way in WAYS}
    means: dict[str, list[float]] = {way: [] for way in WAYS}
    for number in range(options.runs):
        for way in WAYS:
            rate, mean_s = run(engine, work, options.batch, way)
            rates[way].append(round(rate, 1))
            means[way].append(round(mean_s, 2))
            print(f"run {number}, {way}: {rate:.0f} tokens/s, mean end after {mean_s:.1f} s", flush=True)
    clock = "BENCH_THREADS=1 BENCH_CLOCK=cpu " if os.environ.get("BENCH_CLOCK") == "cpu" else ""
    line = f"{clock}python -m benchmarks.cpu.batching --shape {options.shape} --form {options.form}"
    line += f" --requests {options.requests} --batch {options.batch} --runs {options.runs}"
    pairs = [one / other for one, other in zip(*rates.values(), strict=True)]
    figures: dict[str, object] = {
        way: {"tokens_per_s": median(rates[way]), "mean_end_s": median(means[way]), "runs": rates[way]} for way in WAYS
    }
    write(f"cpu_batching_{options.shape}", line, {**figures, "continuous_over_static": round(median(pairs), 2)})


if __name__ == "__main__":
    main()
