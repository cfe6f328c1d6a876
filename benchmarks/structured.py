"""Measures outputs that follow a JSON Schema, with and without drafts of what it forces, on a published model.

    python -m benchmarks.structured [--rows 1,8,32] [--rounds 5] [--threads N] [--quantization int8]

SmolLM2-135M-Instruct writes records of a customer, at temperature 0.7. Free outputs of the same length are what the
tokens/s are compared with. The engines take turns; medians of rounds, the first of which is not counted. Asserts that
drafts change no token.
"""

import argparse
import json
import time
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from benchmarks.machine import median, write
from benchmarks.real_model import checkpoint
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

PROMPT = "<|im_start|>user\nInvent a customer and write the record as JSON.<|im_end|>\n<|im_start|>assistant\n"
MAX_TOKENS = 96
NAME = {"type": "string", "maxLength": 12}
FIELDS: dict[str, Any] = {
    "first_name": NAME,
    "last_name": NAME,
    "date_of_birth": {"type": "string", "format": "date"},
    "is_member": {"type": "boolean"},
    "shipping_address": {
        "street_name": {"type": "string", "maxLength": 16},
        "postal_code": {"type": "string", "pattern": "^[0-9]{5}$"},
        "country": {"enum": ["Germany", "France", "Spain"]},
    },
}
Outputs = dict[str, list[int]]


def schema_of(fields: dict[str, Any]) -> dict[str, Any]:
    """A schema that requires these fields and allows no other."""
    typed = {name: one if "type" in one or "enum" in one else schema_of(one) for name, one in fields.items()}
    return {"type": "object", "properties": typed, "required": list(fields), "additionalProperties": False}


def make_engine(directory: Path, rows: int, speculation: str, quantization: str, threads: int) -> Engine:
    """An engine of the model."""
    config = EngineConfig(
        device="cpu",
        dtype="float32" if quantization == "none" else "auto",
        quantization=quantization,
        max_num_seqs=rows,
        kv_cache_tokens=256 * rows,
        threads=threads,
        speculation=speculation,
    )
    model = read_config(directory)
    grammars = grammars_of(directory, model.vocab_size, model.eos_ids)
    return build_engine(config, model, directory, limits_of(config, model, 1 << 20), grammars=grammars).engine


def run(engine: Engine, prompt: tuple[int, ...], params: list[SamplingParams]) -> tuple[float, int, Outputs]:
    """Tokens per second of all requests at once, the steps that they took, and their tokens."""
    outputs: Outputs = {}
    start, steps = time.perf_counter(), 0
    for at, one in enumerate(params):
        engine.add(EngineRequest(f"{at:032x}", prompt, one))
    while engine.has_work:
        steps += 1
        for event in engine.step().sampled:
            outputs.setdefault(event.request_id, []).extend(event.token_ids)
    num = sum(len(ids) for ids in outputs.values())
    return num / (time.perf_counter() - start), steps, outputs


def measure(directory: Path, rows: int, options: argparse.Namespace) -> dict[str, object]:
    """The figures of one number of sequences."""
    grammar = grammar_of(GrammarJob(Constraint(ConstraintForm.JSON_SCHEMA, json.dumps(schema_of(FIELDS)))))
    prompt = tuple(Tokenizer.from_file(str(directory / "tokenizer.json")).encode(PROMPT, add_special_tokens=False).ids)
    plain, drafting = (
        make_engine(directory, rows, kind, options.quantization, options.threads) for kind in ("none", "grammar")
    )
    ways = {"free": (plain, ""), "schema": (plain, grammar), "drafted": (drafting, grammar)}
    speeds: dict[str, list[float]] = {name: [] for name in ways}
    steps: dict[str, int] = {}
    for turn in range(options.rounds + 1):
        outputs: dict[str, Outputs] = {}
        for name, (engine, source) in ways.items():
            params = [
                SamplingParams(
                    max_tokens=MAX_TOKENS, temperature=0.7, seed=turn * rows + at, grammar=source, ignore_eos=not source
                )
                for at in range(rows)
            ]
            speed, steps[name], outputs[name] = run(engine, prompt, params)
            if turn:
                speeds[name].append(speed)
        assert outputs["schema"] == outputs["drafted"], "drafts have changed tokens"
    found = {name: median(each) for name, each in speeds.items()}
    stats = drafting.scheduler.draft_stats
    figures: dict[str, object] = {f"{name}_tokens_per_s": round(one, 1) for name, one in found.items()}
    return figures | {
        "steps": steps,
        "schema_over_free": round(found["schema"] / found["free"], 3),
        "drafted_over_free": round(found["drafted"] / found["free"], 3),
        "drafted_over_schema": round(found["drafted"] / found["schema"], 3),
        "drafts_right": round(stats.num_accepted / max(1, stats.num_drafted), 3),
    }


def main() -> None:
    """Measure and write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", default="1,8,32")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--quantization", default="none")
    options = parser.parse_args()
    figures: dict[str, object] = {}
    for rows in map(int, options.rows.split(",")):
        figures[str(rows)] = measure(checkpoint(), rows, options)
        print(rows, figures[str(rows)], flush=True)
    more = f"--rows {options.rows} --rounds {options.rounds} --threads {options.threads}"
    suffix = "" if options.quantization == "none" else f"_{options.quantization}"
    command = f"python -m benchmarks.structured {more} --quantization {options.quantization}"
    write(f"structured{suffix}", command, {"by_rows": figures})


if __name__ == "__main__":
    main()
