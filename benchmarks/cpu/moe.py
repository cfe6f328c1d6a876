"""Experts as one call, experts one by one, and a dense MLP of the same active size, side by side.

    python -m benchmarks.cpu.moe [--hidden 1024] [--inner 384] [--experts 8] [--per-token 2] [--layers 4] [--runs 9]
                                 [--threads 2] [--clock wall]

A figure is the median over runs of a pass over all layers, in microseconds a layer. In each run every contestant has
its turn, so that the machine's moods hit all of them. --clock cpu, with --threads 1, takes the processor's time instead
of the wall's: what to use on a machine that others work on too. "read": how many weights the experts' rows need over
those of the dense MLP. Where weights come from memory, no experts take less than that.
"""

import argparse
import time
from collections.abc import Callable, Iterator, Mapping

import torch
from torch import Tensor

from benchmarks.machine import median, write
from sluice_server.engine.models.layers.experts import ExpertRouter, NativeExperts, SeparateExperts
from sluice_server.engine.models.layers.mlp import DenseMlp, Mlp
from sluice_server.kernels import ops
from sluice_server.kernels.cpu import builds
from sluice_server.kernels.formats import weight_formats

FORMATS, ROWS, EPS = ("float32", "bfloat16", "int8", "int4"), (1, 8, 32), 1e-5
CLOCKS: Mapping[str, Callable[[], float]] = {"wall": time.perf_counter, "cpu": time.process_time}


def dense(hidden: int, inner: int, form: str) -> DenseMlp:
    """An MLP of random weights."""
    dtype = torch.bfloat16 if form == "bfloat16" else torch.float32

    def weight(rows: int, inputs: int) -> Tensor:
        return (torch.randn(rows, inputs) * float(inputs**-0.5)).to(dtype)

    gate_up = weight_formats.pack(weight(2 * inner, hidden), gated=True, weights=form)
    return DenseMlp(gate_up, weight_formats.pack(weight(hidden, inner), weights=form), None)


def contestants(options: argparse.Namespace, form: str) -> tuple[dict[str, list[Mlp]], ExpertRouter]:
    """Layers by name, each with weights of its own, which no cache holds when they are used; and the last router."""
    found: dict[str, list[Mlp]] = {"dense": [], "one by one": [], "one call": []}
    for _ in range(options.layers):
        router = ExpertRouter(
            weight_formats.pack(torch.randn(options.experts, options.hidden)), options.per_token, True
        )
        found["dense"].append(dense(options.hidden, options.inner * options.per_token, form))
        for name, kind in (("one by one", SeparateExperts), ("one call", NativeExperts)):
            each = [dense(options.hidden, options.inner, form) for _ in range(options.experts)]
            found[name].append(kind(router, each))
    return found, router


def passes(layers: list[Mlp], h: Tensor, clock: Callable[[], float]) -> Iterator[float]:
    """Microseconds a layer of one pass after the other."""
    while True:
        rows = [h.clone() for _ in layers]
        start = clock()
        for layer, own in zip(layers, rows, strict=True):
            layer.add_to(own, EPS)
        yield (clock() - start) / len(layers) * 1e6


def compare(layers: dict[str, list[Mlp]], h: Tensor, runs: int, clock: Callable[[], float]) -> dict[str, float]:
    """Median microseconds by name. Two runs more come first, to warm up."""
    turns = {name: passes(own, h, clock) for name, own in layers.items()}
    found = [{name: next(turn) for name, turn in turns.items()} for _ in range(runs + 2)][2:]
    return {name: round(median([one[name] for one in found]), 1) for name in turns}


def share_read(router: ExpertRouter, h: Tensor) -> float:
    """Experts that have rows, over those that one token has."""
    experts, _ = router.choose(ops.linear_normed(h, None, EPS, router.linear))
    return len(experts.unique()) / router.per_token


def main() -> None:
    """Measure all formats and write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in (("hidden", 1024), ("inner", 384), ("experts", 8), ("per-token", 2), ("layers", 4), ("runs", 9)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--clock", choices=CLOCKS, default="wall")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    builds.set_threads(options.threads)
    torch.manual_seed(0)
    figures: dict[str, object] = {"settings": vars(options), "instruction set": builds.instruction_set()}
    for form in FORMATS:
        layers, router = contestants(options, form)
        for num in ROWS:
            h = torch.randn(num, options.hidden)
            found = compare(layers, h, options.runs, CLOCKS[options.clock])
            over = {name: round(took / found["dense"], 2) for name, took in found.items() if name != "dense"}
            figures[f"{form}, {num}"] = {"µs": found, "over dense": over, "read": share_read(router, h)}
            print(form, num, figures[f"{form}, {num}"], flush=True)
    write("cpu_moe", "python -m benchmarks.cpu.moe", figures)


if __name__ == "__main__":
    main()
