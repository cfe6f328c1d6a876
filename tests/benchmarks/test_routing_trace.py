"""Traces of conversations: which blocks an answer fills, and that the router counts them once they are reported."""

import json
from pathlib import Path

from benchmarks.routing.__main__ import BLOCK, read
from benchmarks.routing.policies import Fleet, KvCost
from benchmarks.routing.replicas import Arrival, Replica


def row(at_s: float, num: int, answer: int, *blocks: int) -> dict[str, object]:
    return {"timestamp": at_s * 1000, "input_length": num, "output_length": answer, "hash_ids": blocks}


def name(number: int) -> bytes:
    return number.to_bytes(32, "big")


def test_the_next_turn_tells_what_blocks_an_answer_filled(tmp_path: Path) -> None:
    rows = [
        row(0, 2 * BLOCK + 10, BLOCK, 0, 1, 90),
        row(1, 2 * BLOCK + 10, BLOCK, 0, 2, 91),  # another conversation
        row(2, 3 * BLOCK - 5, 4, 0, 1, 92),  # too short for the first one's answer
        row(9, 5 * BLOCK, 1, 0, 1, 3, 4, 5),
        row(10, 7 * BLOCK, 1, 0, 1, 3, 4, 5, 6, 7),
    ]
    path = tmp_path / "trace.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    arrivals = read(path, 1.0, token_s=0.5)
    assert [one.generated for one in arrivals] == [(name(3),), (), (), (), ()]
    assert arrivals[0].answer_s == BLOCK / 2


def test_the_router_counts_what_was_generated_once_it_is_reported() -> None:
    replicas = [Replica(100, BLOCK, 10_000.0) for _ in range(2)]
    fleet = Fleet(replicas, BLOCK, 10_000.0)
    policy = KvCost(fleet, 1.0)
    first = Arrival(0.0, 4 * BLOCK, (name(1), name(2)), (name(3), name(4)), answer_s=5.0)
    engine = policy.choose(first, 0)
    policy.served(engine, replicas[engine].serve(first))
    turn = [name(at) for at in range(1, 7)]
    for at_s, num in ((0.0, 2), (4.0, 2), (20.0, 4)):
        policy.choose(Arrival(at_s, BLOCK, ()), 1)
        assert policy.router.index.matched(turn, fleet.names)[fleet.names[engine]] == num
