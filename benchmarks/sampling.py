"""Measures what sampling adds to a decode step, and what following a JSON Schema costs, on the demo model.

    python -m benchmarks.sampling [--runs 5] [--steps 64] [--threads N]

A step of 32 sequences with every sampling parameter in use by some of them, against the same step with all of them
greedy; 16 sequences that follow a schema against 16 that are free, of the same sampling parameters. Prompts are pieces
of Python's own library, which the demo was trained on. Engines take turns, so that the machine's moods hit both;
medians of steps, then of runs.
"""

import argparse
import dataclasses
import itertools
import json
import sysconfig
import time
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer

from benchmarks.machine import median, write
from sluice_server.engine.build import build_engine
from sluice_server.engine.config import EngineConfig
from sluice_server.engine.engine import Engine
from sluice_server.engine.models.config import read_config
from sluice_server.engine.models.limits import limits_of
from sluice_server.engine.request import EngineRequest, SamplingParams
from sluice_server.services.checkpoint.grammar_ids import grammars_of
from sluice_server.services.messages.work import Constraint, ConstraintForm
from sluice_server.services.tokenizer.grammar_forms import grammar_of
from sluice_server.services.tokenizer.grammar_frames import GrammarJob

DEMO = Path(__file__).parents[1] / "demo" / "target"
PROMPT = 64
TURN = 8  # steps of one engine before the other's
SAMPLED: dict[str, Any] = {"temperature": 0.8, "top_p": 0.95}
PARAMETERS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    SAMPLED,
    {"temperature": 0.7, "top_k": 40},
    {"temperature": 1.0, "min_p": 0.05, "logprobs": 5},
    {"temperature": 0.9, "typical_p": 0.9},
    {"temperature": 0.8, "presence_penalty": 0.5, "frequency_penalty": 0.2},
    {"temperature": 0.8, "repetition_penalty": 1.1, "logprobs": 0, "logprob_token_ids": (10, 20, 30)},
    {
        "temperature": 0.8,
        "logit_bias": tuple((at, 1.0) for at in range(100, 200)),
        "min_tokens": 90,
        "stop_token_ids": (11, 12),
    },
    {"temperature": 0.8, "bad_token_ids": (1, 2, 3), "bad_words": ((5, 6), (7, 8, 9))},
    {"temperature": 0.8, "allowed_token_ids": tuple(range(300, 4000))},
)
SCHEMA = {  # long enough that no output reaches its end
    "type": "array",
    "minItems": 500,
    "items": {
        "type": "object",
        "properties": {
            "name": {"type": "string"},
            "kind": {"enum": ["module", "function", "class"]},
            "line": {"type": "integer"},
            "tags": {"type": "array", "items": {"type": "string"}, "maxItems": 4},
        },
        "required": ["name", "kind", "line", "tags"],
        "additionalProperties": False,
    },
}


def make_engine(num: int, threads: int) -> Engine:
    """An engine of the demo model, with capacity for `num` sequences of its whole context."""
    config = EngineConfig(device="cpu", dtype="float32", max_num_seqs=num, threads=threads)
    model = read_config(DEMO)
    grammars = grammars_of(DEMO, model.vocab_size, model.eos_ids)
    return build_engine(config, model, DEMO, limits_of(config, model, 1 << 20), grammars=grammars).engine


def prompts(num: int, seed: int) -> list[list[int]]:
    """Beginnings of modules, different for each seed as far as there are enough."""
    tokenizer = Tokenizer.from_file(str(DEMO / "tokenizer.json"))
    paths = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    ids = (tokenizer.encode(path.read_text(encoding="utf-8")[:4000]).ids[:PROMPT] for path in paths)
    starts = itertools.cycle([one for one in ids if len(one) == PROMPT])
    return list(itertools.islice(starts, seed * num, (seed + 1) * num))


def fill(engine: Engine, params: list[SamplingParams], seed: int) -> None:
    """Add the requests and compute their prompts."""
    for at, (ids, one) in enumerate(zip(prompts(len(params), seed), params, strict=True)):
        engine.add(EngineRequest(f"{at:032x}", tuple(ids), one))
    produced: set[str] = set()
    while len(produced) < len(params):
        produced.update(event.request_id for event in engine.step().sampled)


def compare(
    these: list[SamplingParams], those: list[SamplingParams], steps: int, seed: int, threads: int
) -> list[float]:
    """Median step in ms with each set of parameters, in turn."""
    engines = [make_engine(len(these), threads), make_engine(len(those), threads)]
    for engine, params in zip(engines, (these, those), strict=True):
        fill(engine, params, seed)
    times: list[list[float]] = [[], []]
    for _ in range(steps // TURN):
        for engine, taken in zip(engines, times, strict=True):
            taken += [_step(engine) for _ in range(TURN)][1:]  # the first brings the weights back into the cache
    assert all(engine.scheduler.num_running == len(these) for engine in engines), "a sequence ended early"
    return [median(taken) for taken in times]


def _step(engine: Engine) -> float:
    start = time.perf_counter()
    engine.step()
    return (time.perf_counter() - start) * 1e3


def mixed_params(num: int, steps: int) -> list[SamplingParams]:
    """Every sampling parameter in use by some of `num` sequences."""
    long = SamplingParams(max_tokens=steps + 40, ignore_eos=True)
    mixed = itertools.islice(itertools.cycle(PARAMETERS), num)
    return [dataclasses.replace(long, seed=at, **one) for at, one in enumerate(mixed)]


def main() -> None:
    """Measure and write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--steps", type=int, default=64)
    parser.add_argument("--threads", type=int, default=0)
    options = parser.parse_args()
    steps, threads = options.steps, options.threads
    greedy = [SamplingParams(max_tokens=steps + 40, ignore_eos=True, temperature=0.0)] * 32
    pairs = [compare(greedy, mixed_params(32, steps), steps, seed, threads) for seed in range(options.runs)]
    plain, mixed = (median([pair[at] for pair in pairs]) for at in (0, 1))
    added = median([pair[1] / pair[0] - 1 for pair in pairs])
    print(
        f"32 sequences: greedy {plain:.2f} ms, all sampling parameters mixed {mixed:.2f} ms: +{added:.1%}", flush=True
    )
    grammar = grammar_of(GrammarJob(Constraint(ConstraintForm.JSON_SCHEMA, json.dumps(SCHEMA))))
    free = [SamplingParams(max_tokens=steps + 40, ignore_eos=True, seed=at, **SAMPLED) for at in range(16)]
    bound = [dataclasses.replace(one, ignore_eos=False, grammar=grammar) for one in free]
    pairs = [compare(free, bound, steps, seed, threads) for seed in range(options.runs)]
    loose, tight = (median([pair[at] for pair in pairs]) for at in (0, 1))
    kept = median([pair[0] / pair[1] for pair in pairs])
    print(f"16 sequences: free {loose:.2f} ms, JSON Schema {tight:.2f} ms: {kept:.1%} of the tokens/s", flush=True)
    command = f"python -m benchmarks.sampling --runs {options.runs} --steps {steps} --threads {threads}"
    figures = {
        "parameters_of_32": {"greedy_ms": round(plain, 3), "mixed_ms": round(mixed, 3), "added": round(added, 4)},
        "json_schema_of_16": {"free_ms": round(loose, 3), "schema_ms": round(tight, 3), "kept": round(kept, 4)},
    }
    write("sampling", command, {"threads": threads or torch.get_num_threads(), **figures})


if __name__ == "__main__":
    main()
