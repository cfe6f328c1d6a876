"""The router: the engine that is expected to bring the first token soonest, and its figures on a small trace."""

import random

from benchmarks.routing.__main__ import BLOCK, compare
from benchmarks.routing.replicas import Arrival
from sluice_server.services.routing.router import Router

ENGINES = ("e0", "e1")


def name(number: int) -> bytes:
    return number.to_bytes(32, "big")


def named(names: list[bytes], engines: tuple[str, ...] = ENGINES) -> dict[str, list[bytes]]:
    return {engine: names for engine in engines}


def router() -> Router:
    made = Router(ENGINES, block_size=10, tokens_per_s=100.0)
    for engine in ENGINES:
        made.index.report(engine, 1, 0, (), (), is_whole=True)
    return made


def test_equal_engines_take_turns() -> None:
    made = router()
    assert {made.choose(named([]), 10, 0.0).engine for _ in range(2)} == {"e0", "e1"}


def test_a_prompt_goes_where_its_prefix_is() -> None:
    made = router()
    made.index.report("e1", 1, 1, (), [name(1), name(2)])
    choice = made.choose(named([name(1), name(2)]), 25, 0.0)
    assert (choice.engine, choice.num_cached) == ("e1", 20)
    assert made.choose(named([name(1), name(2)]), 20, 9.0).num_cached == 19  # the last token is computed anyway


def test_a_prefix_that_is_still_waiting_to_be_computed_counts() -> None:
    made = router()
    first = made.choose(named([name(1)]), 10, 0.0)
    assert made.choose(named([name(1), name(2)]), 20, 0.05).engine == first.engine


def test_an_engine_that_is_too_busy_loses_its_prefix_to_a_free_one() -> None:
    made = router()
    made.index.report("e1", 1, 1, (), [name(1)])
    made.queues["e1"].add(50, 0.0)
    assert made.choose(named([name(1)]), 15, 0.0).engine == "e0"
    assert made.queues["e1"].left(0.25) == 25.0


def test_only_engines_that_serve_are_chosen() -> None:
    made = router()
    made.index.report("e1", 1, 1, (), [name(1)])
    assert made.choose(named([name(1)], ("e0",)), 15, 0.0).engine == "e0"


def test_a_lost_engine_begins_anew() -> None:
    made = router()
    made.index.report("e1", 1, 1, (), [name(1)])
    made.queues["e1"].add(500, 0.0)
    made.lost("e1")
    assert made.queues["e1"].left(0.0) == 0.0 and made.index.matched([name(1)], ENGINES)["e1"] == 0


def test_an_engine_that_joins_is_chosen_and_one_that_left_is_forgotten() -> None:
    made = router()
    made.index.report("e1", 1, 1, (), [name(1)])
    made.queues["e0"].add(500, 0.0)
    made.change(("e0", "e2"))
    assert made.choose(named([name(1)], ("e0", "e2")), 15, 0.0).engine == "e2"
    assert made.queues["e0"].left(0.0) == 500.0 and "e1" not in made.queues
    made.change(("e0", "e1", "e2"))
    assert made.index.matched([name(1)], ["e1", "e2"]) == {"e1": 0, "e2": 1} and not made.index.knows("e1")


def test_conversations_find_their_prefixes_nearly_as_with_instant_knowledge() -> None:
    """Simulated time: the result is the same on every machine."""
    rng = random.Random(1)
    talks: list[list[bytes]] = [[name(0)] for _ in range(60)]
    arrivals, now_s = [], 0.0
    for number in range(1500):
        now_s += rng.expovariate(4.0)
        talk = rng.choice(talks)
        talk.append(name(1 + number))
        arrivals.append(Arrival(now_s, len(talk) * BLOCK + rng.randrange(BLOCK), tuple(talk)))
        if len(talk) > 20:
            talks[talks.index(talk)] = [name(0)]
    results = compare(arrivals, 4, 300_000, 10_000.0)
    ours, late = results["kv-cost, lag 0.25 s"], results["kv-cost, lag 5 s"]
    assert ours["cached"] >= 0.98 * results["oracle"]["cached"]
    assert ours["mean_s"] <= 0.5 * results["least-loaded"]["mean_s"]
    assert ours["mean_s"] <= 0.35 * results["request-id hash"]["mean_s"]
    assert late["mean_s"] <= 1.1 * ours["mean_s"]
