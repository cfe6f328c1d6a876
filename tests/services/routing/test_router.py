"""The router: the engine that is expected to bring the first token soonest, and its figures on a small trace."""

import random

from benchmarks.routing.__main__ import BLOCK, compare
from benchmarks.routing.replicas import Arrival
from sluice_server.services.messages.processes import EngineRole
from sluice_server.services.routing.router import EngineState, PrefillQueue, Router

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


def test_a_queue_is_as_long_as_before_when_another_rate_is_measured() -> None:
    queue = PrefillQueue(tokens_per_s=100.0)
    queue.add(100, 5.0)
    queue.measured(50.0, 5.5)
    assert (queue.left(5.5), queue.left(6.0)) == (50.0, 25.0)
    queue.measured(0.0, 6.0)
    assert (queue.left(6.0), queue.left(6.5), queue.left(9.0)) == (25.0, 0.0, 0.0)


def test_engines_that_name_a_prompt_differently_are_matched_each_by_its_own_names() -> None:
    made = router()
    made.index.report("e0", 1, 1, (), [name(1)])
    made.index.report("e1", 1, 1, (), [name(11), name(12)])
    choice = made.choose({"e0": [name(1), name(2)], "e1": [name(11), name(12)]}, 25, 0.0)
    assert (choice.engine, choice.num_cached) == ("e1", 20)


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


def split(**running: int) -> Router:
    """A router of an engine for prompts, e0, and one for both, e1."""
    made = router()
    made.states["e0"] = EngineState(EngineRole.PREFILL)
    made.states["e1"] = EngineState(num_running=running.get("e1", 0))
    return made


def test_a_long_prompt_is_computed_apart_only_while_streams_would_wait_for_it() -> None:
    assert split(e1=0).choose(named([]), 1000, 0.0).engine == "e1"
    assert split(e1=1).choose(named([]), 1000, 0.0).engine == "e0"
    assert split(e1=1).choose(named([]), 40, 0.0).engine == "e1"  # a hand-off would take longer
    held = split(e1=1)
    held.index.report("e1", 1, 1, (), [name(at) for at in range(100)])
    assert held.choose(named([name(at) for at in range(100)]), 1010, 0.0).engine == "e1"  # little is left


def test_an_engine_for_prompts_that_is_busy_or_far_away_gets_none() -> None:
    busy = split(e1=1)
    busy.queues["e0"].add(1000, 0.0)
    assert busy.choose(named([]), 1000, 0.0).engine == "e1"
    far = split()
    far.states["e1"] = EngineState(num_running=1, fetch_share=1.0)
    assert far.choose(named([]), 1000, 0.0).engine == "e1"


def test_an_engine_for_decoding_computes_short_prompts_only() -> None:
    made = split()
    made.states["e1"] = EngineState(EngineRole.DECODE)
    made.queues["e0"].add(10_000, 0.0)
    assert [made.choose(named([]), num, 0.0).engine for num in (256, 257)] == ["e1", "e0"]


def test_what_is_handed_off_counts_as_held() -> None:
    made = split()
    choice = made.choose(named([name(1)], ("e1",)), 19, 0.0, is_handed_off=True)
    assert (choice.engine, choice.num_cached) == ("e1", 10) and made.queues["e1"].left(0.0) == 9
