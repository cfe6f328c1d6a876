"""The index of blocks: equal to a set for each engine under random reports, gaps, restarts and expectations."""

import random
from collections.abc import Sequence

from sluice_server.services.routing.index import EXPECTED_S, CacheIndex

ENGINES = ("e0", "e1", "e2")


def name(number: int) -> bytes:
    return number.to_bytes(32, "big")


def whole(engines: Sequence[str] = ENGINES) -> CacheIndex:
    index = CacheIndex(engines)
    for engine in engines:
        assert index.report(engine, 1, 0, (), (), is_whole=True)
    return index


def test_each_engine_is_matched_as_far_as_it_holds_the_prompt() -> None:
    index = whole()
    index.report("e0", 1, 1, (), [name(1), name(2), name(4)])
    index.report("e1", 1, 1, (), [name(1)])
    assert index.matched([name(at) for at in (1, 2, 3, 4)], ENGINES) == {"e0": 2, "e1": 1, "e2": 0}
    assert index.matched([name(1), name(2)], ["e0", "e2"]) == {"e0": 2, "e2": 0}
    assert index.matched([], ENGINES) == dict.fromkeys(ENGINES, 0)


def test_what_was_routed_counts_until_it_is_reported_or_overdue() -> None:
    index = whole()
    index.expect("e2", [name(1), name(2)], now_s=0.0)
    assert index.matched([name(1), name(2)], ENGINES)["e2"] == 2
    index.report("e2", 1, 1, (), [name(1)])
    index.expect("e0", [], now_s=EXPECTED_S)
    assert index.matched([name(1), name(2)], ENGINES)["e2"] == 1 and not index.num_expected
    index.expect("e2", [name(2)], now_s=100.0)
    index.expect("e2", [name(2)], now_s=130.0)  # again: the first end counts
    index.expect("e2", [], now_s=99.0 + EXPECTED_S)
    assert index.matched([name(1), name(2)], ENGINES)["e2"] == 2
    index.expect("e2", [], now_s=100.0 + EXPECTED_S)
    assert index.matched([name(1), name(2)], ENGINES)["e2"] == 1


def test_a_block_may_be_expected_of_several_engines() -> None:
    index, names = whole(), [name(1), name(2)]
    index.expect("e0", names[:1], now_s=0.0)
    index.expect("e2", names, now_s=0.0)
    assert index.matched(names, ENGINES) == {"e0": 1, "e1": 0, "e2": 2}
    index.report("e2", 1, 1, (), names)
    assert index.matched(names, ENGINES) == {"e0": 1, "e1": 0, "e2": 2}


def test_of_a_long_prompt_some_blocks_stand_for_all() -> None:
    """Caches let go of ends first, so an engine that holds a block holds those before it."""
    index = whole()
    names = [name(at) for at in range(100)]
    index.report("e0", 1, 1, (), names[:71])
    index.report("e1", 1, 1, (), names[:16])
    index.expect("e2", names, now_s=0.0)
    assert index.num_expected == 16 + 5 + 4
    assert index.matched(names, ENGINES) == {"e0": 71, "e1": 16, "e2": 100}
    other = [*names[:90], *(name(200 + at) for at in range(20))]
    assert index.matched(other, ENGINES) == {"e0": 71, "e1": 16, "e2": 80}, "a few less"
    assert index.matched(names[:40], ENGINES) == {"e0": 40, "e1": 16, "e2": 32}
    index.expect("e0", names, now_s=0.0, first=71)
    assert index.matched(names, ENGINES)["e0"] == 100
    assert index.num_expected == 16 + 5 + 4


def test_the_next_turn_of_a_conversation_finds_all_of_the_one_before() -> None:
    """Before the engine has reported a block: the end of a prompt is where the next one goes on."""
    index, names = whole(), [name(at) for at in range(200)]
    for num in (1, 15, 16, 17, 31, 40, 100, 112):
        index.expect("e1", names[:num], now_s=0.0, first=index.matched(names[:num], ENGINES)["e1"])
        assert index.matched(names, ENGINES)["e1"] == num


def test_blocks_that_were_generated_count_as_soon_as_they_are_reported() -> None:
    index, names = whole(), [name(at) for at in range(60)]
    index.expect("e1", names[:40], now_s=0.0)
    index.report("e1", 1, 1, (), names[:40])
    assert index.matched(names, ENGINES)["e1"] == 40
    for number, at in enumerate(range(40, 50), 2):  # one by one, as they are filled
        index.report("e1", 1, number, (), [names[at]])
        assert index.matched(names, ENGINES) == {"e0": 0, "e1": at + 1, "e2": 0}


def test_after_a_gap_nothing_is_believed_before_a_whole_report() -> None:
    index = whole()
    assert index.report("e0", 1, 1, (), [name(1)])
    assert not index.report("e0", 1, 3, (), [name(3)])
    assert index.matched([name(1)], ENGINES)["e0"] == 0
    assert not index.report("e0", 1, 4, (), [name(4)])
    assert index.report("e0", 1, 7, (), [name(1)], is_whole=True)
    assert index.report("e0", 1, 8, (), [name(2)])
    assert index.matched([name(1), name(2)], ENGINES)["e0"] == 2
    assert not index.report("e0", 2, 9, (), [])  # another process


def test_an_engine_that_ends_is_forgotten_and_the_others_are_not() -> None:
    index = whole()
    for engine in ("e0", "e1"):
        index.report(engine, 1, 1, (), [name(1)])
        index.expect(engine, [name(2)], 0.0)
    index.forget("e0")
    assert index.matched([name(1), name(2)], ENGINES) == {"e0": 0, "e1": 2, "e2": 0}
    assert index.num_expected == 1


def test_reports_of_strangers_are_ignored() -> None:
    index = whole()
    assert index.report("e9", 1, 5, (), [name(1)])
    assert index.matched([name(1)], ENGINES) == dict.fromkeys(ENGINES, 0)


def test_it_is_a_set_for_each_engine() -> None:
    rng = random.Random(0)
    index = whole()
    held = {engine: set[bytes]() for engine in ENGINES}
    numbers = dict.fromkeys(ENGINES, 1)
    for _ in range(20_000):
        engine = rng.choice(ENGINES)
        added = [name(rng.randrange(60)) for _ in range(rng.randrange(4))]
        removed = rng.sample(sorted(held[engine]), min(len(held[engine]), rng.randrange(4)))
        is_whole = rng.random() < 0.02
        if rng.random() < 0.02:  # one is lost, and so all behind it until the whole is told
            numbers[engine] += 1
        taken = index.report(engine, 1, numbers[engine], () if is_whole else removed, added, is_whole=is_whole)
        held[engine] = {*added} if is_whole else ({*held[engine]} - {*removed}) | {*added} if taken else set()
        numbers[engine] += taken
        names = [name(at) for at in rng.sample(range(60), 5)]
        expected = {
            one: next((at for at, each in enumerate(names) if each not in held[one]), len(names)) for one in ENGINES
        }
        assert index.matched(names, ENGINES) == expected


def test_engines_that_join_take_the_place_of_those_that_left_without_their_blocks() -> None:
    index = whole()
    index.report("e1", 1, 1, (), [name(1)])
    index.report("e2", 1, 1, (), [name(1)])
    index.expect("e1", [name(2)], now_s=0.0)
    index.change(("e0", "e2", "e3", "e4"))
    assert index.matched([name(1)], ["e0", "e2", "e3", "e4"]) == {"e0": 0, "e2": 1, "e3": 0, "e4": 0}
    assert not index.num_expected and index.report("e1", 1, 2, (), [name(3)])  # of an engine that left: ignored
    assert not index.report("e3", 1, 2, (), [name(3)])  # it must say all first
    assert index.report("e4", 1, 0, (), [name(1)], is_whole=True)
    assert index.matched([name(1)], ["e3", "e4"]) == {"e3": 0, "e4": 1}
