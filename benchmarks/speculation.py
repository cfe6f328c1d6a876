"""Compares speculation with plain decoding on the demo pair: speed-up by concurrency, distance from the ideal, and the
cost where nothing is drafted. Every pair of runs must give equal tokens.

    python -m benchmarks.speculation [--pairs 7] [--tokens 96] [--most 64] [--fresh]

What has been measured is kept in benchmarks/out/ part by part: stopped and run again with the same options it goes on;
`--fresh` begins anew.

One compute thread, and seconds of the process's own CPU time: what a machine does beside this does not count, and the
controller learns from the same clock. Loads: see `speculation_loads`. `look_up` measures prompt look-up on both of them
with engines that have the processor's caches to themselves for a whole run, as in a service; elsewhere all take turns
step by step, so that one plain run serves several proposers.
"""

import argparse
import dataclasses
import functools
import itertools
import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TypeVar

from benchmarks.machine import RESULTS, write
from benchmarks.speculation_ideal import StepWatch, acceptance, bound, costs
from benchmarks.speculation_loads import DEMO, ClosedLoad, continuations, copied, distinct, edits
from benchmarks.speculation_parts import SavedResults, figures_of
from benchmarks.speculation_plot import plot
from sluice_server.engine.build import build_engine
from sluice_server.engine.config import EngineConfig
from sluice_server.engine.engine import Engine
from sluice_server.engine.models.config import read_config
from sluice_server.engine.models.limits import limits_of
from sluice_server.services.checkpoint.grammar_ids import grammars_of

CONFIG = EngineConfig(device="cpu", dtype="float32", threads=1, kv_cache_tokens=1 << 16)
KINDS = {
    "none": CONFIG,
    "ngram": dataclasses.replace(CONFIG, speculation="ngram"),
    "draft": dataclasses.replace(CONFIG, speculation="draft", draft_model="demo"),
    "eagle": dataclasses.replace(CONFIG, speculation="eagle", draft_model="demo"),
}
FOLDERS = {"draft": "draft", "eagle": "head"}  # of demo/
PARTS = Path(__file__).parent / "out" / "speculation.json"
LENGTHS = (1, 2, 3, 4, 6, 8)  # fixed ones that the controller is compared with
PLAIN, ADAPTIVE = 0, -1  # without drafts, and as the controller says
WARM_UPS, LARGE = 2, 16  # the controller learns costs at each concurrency; from so many sequences on one run is enough
Outputs = dict[str, list[int]]
Key = TypeVar("Key")
Decode = Callable[[Mapping[str, Engine], ClosedLoad], dict[str, "BatchRun"]]


@dataclasses.dataclass(frozen=True)
class BatchRun:
    """The cost of one batch of requests."""

    seconds: float
    outputs: Outputs

    @property
    def rate(self) -> float:
        """Tokens per second of CPU."""
        return sum(len(ids) for ids in self.outputs.values()) / self.seconds


def make(config: EngineConfig) -> Engine:
    """An engine of the demo pair that counts CPU time."""
    model = read_config(DEMO / "target")
    folder = FOLDERS.get(config.speculation)
    draft = DEMO / folder if folder is not None else None
    target = DEMO / "target"
    grammars = grammars_of(target, model.vocab_size, model.eos_ids)
    engine = build_engine(config, model, target, limits_of(config, model, 1 << 20), draft, grammars=grammars).engine
    return Engine(engine.scheduler, engine.runner, time.process_time, engine.proposer)


def decode(
    engines: Mapping[Key, Engine], load: ClosedLoad, watches: Mapping[Key, StepWatch] = MappingProxyType({})
) -> dict[Key, BatchRun]:
    """All of a load by each engine, taking turns step by step: what slows the machine down slows all of them. Their
    order is drawn anew each time: behind whom an engine comes decides what the caches hold, which was worth 2 %."""
    order = random.Random(1)
    waiting = {key: load.requests() for key in engines}
    outputs: dict[Key, Outputs] = {key: {} for key in engines}
    seconds = dict.fromkeys(engines, 0.0)
    for key, engine in engines.items():
        for request in itertools.islice(waiting[key], load.concurrency):
            engine.add(request)
    while going := [key for key, engine in engines.items() if engine.has_work]:
        order.shuffle(going)
        for key in going:
            start = time.process_time()
            events = engines[key].step()
            seconds[key] += time.process_time() - start
            if key in watches:
                watches[key].note(events)
            for event in events.sampled:
                outputs[key].setdefault(event.request_id, []).extend(event.token_ids)
                following = next(waiting[key], None) if event.is_last else None
                if following is not None:
                    engines[key].add(following)
    return {key: BatchRun(seconds[key], outputs[key]) for key in engines}


def apart(engines: Mapping[Key, Engine], load: ClosedLoad) -> dict[Key, BatchRun]:
    """Runs a load on each engine, one after the other; the order is drawn from the steps so far."""
    order = list(engines)
    random.Random(sum(engine.stats.num_steps for engine in engines.values())).shuffle(order)
    runs = {key: decode({key: engines[key]}, load)[key] for key in order}
    return {key: runs[key] for key in engines}


def paired(engines: Mapping[str, Engine], load: ClosedLoad, pairs: int, run: Decode = decode) -> dict[str, object]:
    """Compares each kind with plain decoding, after runs of each to learn from."""
    for _ in range(WARM_UPS if load.concurrency < LARGE else 1):
        run(engines, load)
    before = {kind: _counts(engine) for kind, engine in engines.items()}
    found = [run(engines, load) for _ in range(pairs)]
    assert all(run.outputs == runs["none"].outputs for runs in found for run in runs.values()), "other tokens"
    num_tokens = sum(len(ids) for runs in found for ids in runs["none"].outputs.values())
    return {
        "plain_tokens_per_s": round(statistics.median(runs["none"].rate for runs in found)),
        **{
            kind: _summary(engine, before[kind], [runs[kind].rate / runs["none"].rate for runs in found], num_tokens)
            for kind, engine in engines.items()
            if kind != "none"
        },
    }


def _counts(engine: Engine) -> tuple[int, int, int]:
    stats = engine.scheduler.draft_stats
    return stats.num_drafted, stats.num_accepted, sum(stats.drafted_at[:1])


def _summary(
    engine: Engine, before: tuple[int, int, int], ratios: Sequence[float], num_tokens: int
) -> dict[str, object]:
    """The summary of runs with `num_tokens` tokens in all."""
    drafted, accepted, drafts = (now - then for now, then in zip(_counts(engine), before, strict=True))
    return {
        "speed_up": round(statistics.median(ratios), 3),
        "least": round(min(ratios), 3),
        "drafted": drafted,
        "accepted": accepted,
        "length_of_drafts": round(drafted / max(1, drafts), 2),
        "drafted_per_row_and_step": round(drafted / max(1, num_tokens - accepted), 3),
    }


def ideal(load: ClosedLoad, kind: str) -> dict[str, object]:
    """The controller's result on a load, beside the best that measured costs and acceptance allow."""
    fixed = {num: dataclasses.replace(KINDS[kind], draft_length="fixed", max_draft_tokens=num) for num in LENGTHS}
    engines = {PLAIN: make(KINDS["none"]), ADAPTIVE: make(KINDS[kind])}
    engines |= {num: make(config) for num, config in fixed.items()}
    decode(engines, load)
    watches = {num: StepWatch(engine.split, load.concurrency) for num, engine in engines.items()}
    runs = decode(engines, load, watches)
    accepted = acceptance([engines[num].scheduler.draft_stats for num in LENGTHS])
    found = costs(watches[PLAIN], {num: watches[num] for num in LENGTHS})
    num_tokens = sum(len(ids) for ids in runs[PLAIN].outputs.values())
    best, length = bound(runs[PLAIN].seconds, num_tokens / load.concurrency, found, accepted)
    reached = runs[ADAPTIVE].rate / runs[PLAIN].rate
    return {
        "step_ms_by_drafts": {num: round(1e3 * one, 3) for num, one in found.step_s.items()},
        "drafting_ms_by_drafts": {num: round(1e3 * one, 3) for num, one in found.draft_s.items()},
        "reading_ms": round(1e3 * found.reading_s, 1),
        "acceptance_by_position": [round(one, 3) for one in accepted],
        "by_fixed_length": {num: round(runs[num].rate / runs[PLAIN].rate, 3) for num in LENGTHS},
        "ideal": round(best, 3),
        "ideal_length": length,
        "reached": round(reached, 3),
        "share_of_ideal": round(reached / best, 3),
    }


def idle(load: ClosedLoad, pairs: int) -> dict[str, object]:
    """Measures the controller's cost on text without predictable tokens, where it drafts nothing."""
    engines = {kind: make(KINDS[kind]) for kind in KINDS}
    found = paired(engines, load, pairs)
    return {kind: found[kind] for kind in KINDS if kind != "none"}


def parts_of(options: argparse.Namespace) -> dict[str, Callable[[], object]]:
    """The parts of the measurement, by name."""
    num_tokens, pairs = options.tokens, options.pairs
    parts: dict[str, Callable[[], object]] = {}
    for name, prompts in (("edits", edits), ("continuations", continuations)):
        for num in sorted({1, min(8, options.most), options.most}):
            load = ClosedLoad(prompts(size_of(num)), num, num_tokens)
            parts[f"look_up_{name}/{num}"] = functools.partial(look_up, load, pairs)
    for num in (num for num in (1, 4, 16) if num <= options.most):
        for kind in ("draft", "eagle"):  # proposers that always have a draft
            parts[f"{kind}_ideal/{num}"] = functools.partial(
                ideal, ClosedLoad(continuations(size_of(num)), num, num_tokens), kind
            )
    for num in sorted({1, options.most}):
        load = ClosedLoad(continuations(size_of(num)), num, num_tokens, 3.0)
        parts[f"drafts_nothing/{num}"] = functools.partial(idle, load, pairs)
    for num in (2**i for i in range(options.most.bit_length())):
        load = ClosedLoad(continuations(size_of(num)), num, num_tokens)
        parts[f"by_concurrency/{num}"] = functools.partial(together, load, pairs)
    return parts


def size_of(concurrency: int) -> int:
    """The number of prompts of a load."""
    return max(6, concurrency + concurrency // 2)


def look_up(load: ClosedLoad, pairs: int) -> dict[str, object]:
    """Prompt look-up on a load, and what its outputs are like: shares of tokens copied from the prompt, and of 4-grams
    that differ."""
    engines = {kind: make(KINDS[kind]) for kind in ("none", "ngram")}
    outputs = apart({"none": engines["none"]}, load)["none"].outputs
    like = {"copied": round(copied(load, outputs), 3), "distinct_4_grams": round(distinct(outputs), 3)}
    return {**like, **paired(engines, load, pairs, apart)}


def together(load: ClosedLoad, pairs: int) -> dict[str, object]:
    """All kinds at one concurrency, with new engines."""
    return paired({kind: make(config) for kind, config in KINDS.items()}, load, pairs)


def drawing(by_concurrency: Mapping[str, Mapping[str, Mapping[str, float]]]) -> str:
    """The plot of a result's `by_concurrency`."""
    kinds = [kind for kind in KINDS if kind != "none"]

    def lines(field: str) -> dict[str, list[float]]:
        return {kind: [found[kind][field] for found in by_concurrency.values()] for kind in kinds}

    return plot([int(num) for num in by_concurrency], lines("speed_up"), lines("drafted_per_row_and_step"))


def main() -> None:
    """Measure and write benchmarks/results/speculation.json and .svg."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=7)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--most", type=int, default=64)
    parser.add_argument("--fresh", action="store_true", help="forget what an earlier run measured")
    options = parser.parse_args()
    asked = {"pairs": options.pairs, "tokens": options.tokens, "most": options.most}
    kept = SavedResults(PARTS, asked, is_fresh=options.fresh)
    for name, measure in parts_of(options).items():
        if name not in kept.parts:
            kept.add(name, measure())
            print(name, kept.parts[name], flush=True)
    figures = figures_of(kept.parts)
    write("speculation", "make bench-speculation", {**asked, **figures})
    by_concurrency = figures["by_concurrency"]
    assert isinstance(by_concurrency, dict)
    (RESULTS / "speculation.svg").write_text(drawing(by_concurrency))


if __name__ == "__main__":
    main()
