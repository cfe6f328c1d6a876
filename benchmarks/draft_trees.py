"""Compares trees of drafts with chains and plain decoding on the demo pair, in CPU seconds of one thread.

    python -m benchmarks.draft_trees [--concurrency 1] [--tokens 160] [--runs 3] [--who draft eagle]

Prints for each form its speed-up over plain decoding (the median of the runs), and its drafts. Tokens must be equal.
"""

import argparse
import dataclasses
import json
import statistics

from benchmarks.speculation import KINDS, decode, make, size_of
from benchmarks.speculation_loads import ClosedLoad, continuations
from sluice_server.engine.config import EngineConfig


def forms_of(who: str) -> dict[str, EngineConfig]:
    """The measured settings by name: drafts of every form, fixed and chosen by the controller."""
    chain = KINDS[who]
    fixed = dataclasses.replace(chain, draft_length="fixed", max_draft_tokens=4)
    return {
        "none": KINDS["none"],
        "chain": chain,
        **{f"width {width}": dataclasses.replace(chain, max_draft_width=width) for width in (2, 4)},
        "four": fixed,
        "four and four": dataclasses.replace(fixed, max_draft_tokens=8, max_draft_width=2),
    }


def compare(who: str, load: ClosedLoad, num_runs: int) -> dict[str, dict[str, float]]:
    """Measures all forms, alternating step by step."""
    engines = {name: make(config) for name, config in forms_of(who).items()}
    decode(engines, load)
    runs = [decode(engines, load) for _ in range(num_runs)]
    assert all(one.outputs == run["none"].outputs for run in runs for one in run.values()), "other tokens"
    stats = {name: engine.scheduler.draft_stats for name, engine in engines.items()}
    return {
        name: {
            "speed_up": round(statistics.median(run[name].rate / run["none"].rate for run in runs), 3),
            "drafted": stats[name].num_drafted,
            "accepted": stats[name].num_accepted,
            "accepted_per_draft": round(stats[name].num_accepted / max(1, sum(stats[name].drafted_at[:1])), 3),
        }
        for name in engines
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--concurrency", type=int, default=1)
    parser.add_argument("--tokens", type=int, default=160)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--who", nargs="+", choices=("draft", "eagle"), default=("draft", "eagle"))
    options = parser.parse_args()
    num = options.concurrency
    load = ClosedLoad(continuations(size_of(num)), num, options.tokens)
    print(json.dumps({who: compare(who, load, options.runs) for who in options.who}, indent=2))


if __name__ == "__main__":
    main()
