"""Lengths of load tests: drawn ones have the means they should, those of traces keep their proportions."""

import json
import random
from pathlib import Path

import pytest

from benchmarks.cpu.load_lengths import MOST_IN, MOST_OUT, from_trace, scaled, sharegpt


def test_drawn_lengths_have_a_quarter_of_the_means() -> None:
    rng, draw = random.Random(3), sharegpt()
    found = [draw(rng) for _ in range(20_000)]
    assert sum(num for num, _ in found) / len(found) == pytest.approx(215 / 4, rel=0.05)
    assert sum(num for _, num in found) / len(found) == pytest.approx(198 / 4, rel=0.05)
    assert max(num for num, _ in found) <= MOST_IN and max(num for _, num in found) <= MOST_OUT
    assert min(num for _, num in found) >= 2


def test_the_longest_of_a_trace_just_fits() -> None:
    draw = scaled([(76_800, 100), (7_680, 512), (10, 1)])
    found = {draw(random.Random(seed)) for seed in range(50)}
    assert found == {(MOST_IN, 50), (77, MOST_OUT), (1, 2)}  # of an output of one token nothing is measured
    assert scaled([(100, 50)])(random.Random(0)) == (100, 50)


def test_traces_are_read_in_either_format(tmp_path: Path) -> None:
    mooncake, azure = tmp_path / "m.jsonl", tmp_path / "a.csv"
    row = {"timestamp": 0, "input_length": 600, "output_length": 20, "hash_ids": [0, 1]}
    mooncake.write_text(json.dumps(row) + "\n")
    azure.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03.9799600,480,10\n")
    assert from_trace(mooncake)(random.Random(0)) == (600, 20)
    assert from_trace(azure)(random.Random(0)) == (480, 10)
