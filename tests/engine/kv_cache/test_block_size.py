"""The choice of a block size: properties of any traffic, and cases by hand."""

import dataclasses

from hypothesis import assume, given
from hypothesis import strategies as st

from sluice_server.engine.kv_cache.block_size import (
    GRAIN,
    LEAST_BYTES,
    LEAST_GAIN,
    LEAST_REQUESTS,
    NUM_ENDS,
    SIZES,
    USUAL,
    Saved,
    Traffic,
    allowed_sizes,
    choose,
    cost,
    merged,
)

NOTHING = Saved()
counts = st.integers(0, 1 << 20)
traffics = st.builds(
    Traffic,
    block_size=st.sampled_from(SIZES),
    block_bytes=counts,
    num_requests=st.integers(LEAST_REQUESTS, 1 << 16),
    num_tokens=st.integers(1, 1 << 24),
    ends=st.tuples(*[st.integers(0, 1 << 12)] * NUM_ENDS),
    unused=st.floats(0, 1),
    num_hits=counts,
    num_recomputed=counts,
    num_evicted=counts,
    token_s=st.floats(1e-6, 0.1),
)
some_sizes = st.lists(st.sampled_from(SIZES), min_size=1, unique=True).map(sorted)


def ending(end: int, num: int = 100, num_tokens: int = 20_000) -> Traffic:
    """A run in which so many prompts began as others did, for `end` grains."""
    ends = tuple(num if at == end % NUM_ENDS else 0 for at in range(NUM_ENDS))
    return Traffic(32, num_requests=num, num_tokens=num_tokens, ends=ends, token_s=1e-3)


@given(traffics, some_sizes, st.booleans())
def test_another_size_is_taken_only_where_it_saves(traffic: Traffic, allowed: list[int], has_files: bool) -> None:
    chosen = choose(traffic, allowed, NOTHING, has_files=has_files).size
    assert chosen in allowed
    if traffic.block_size not in allowed or chosen == traffic.block_size:
        return
    costs = {size: cost(traffic, size, has_files=has_files) for size in allowed}
    assert costs[chosen] == min(costs.values())
    assert costs[traffic.block_size] - costs[chosen] >= LEAST_GAIN * traffic.num_tokens


@given(traffics, some_sizes, st.booleans())
def test_the_choice_stands_while_the_traffic_is_the_same(traffic: Traffic, allowed: list[int], has_files: bool) -> None:
    assume(traffic.block_size in allowed)
    chosen = choose(traffic, allowed, NOTHING, has_files=has_files).size
    unused = min(1.0, traffic.unused * chosen / traffic.block_size)
    if unused == 1.0:
        return  # slots are all unused: no run goes on so
    again = dataclasses.replace(traffic, block_size=chosen, unused=unused)
    assert choose(again, allowed, NOTHING, has_files=has_files).size == chosen


@given(traffics, some_sizes, st.integers(0, 1 << 24), st.booleans())
def test_what_is_saved_is_given_up_only_for_more(
    traffic: Traffic, allowed: list[int], num_saved: int, has_files: bool
) -> None:
    found = choose(traffic, allowed, Saved(num_saved, "/kept"), has_files=has_files)
    freely = choose(traffic, allowed, NOTHING, has_files=has_files)
    now = traffic.block_size
    if now not in allowed:
        return
    gain = cost(traffic, now, has_files=has_files) - cost(traffic, freely.size, has_files=has_files)
    assert found.size == (freely.size if gain > num_saved else now)
    if found.size != freely.size:
        assert "/kept keeps" in found.because and "clear it to change" in found.because
    elif found.size != now and num_saved:
        assert "what /kept keeps in blocks of" in found.because


@given(traffics)
def test_engines_that_saw_the_same_choose_as_one(traffic: Traffic) -> None:
    both = merged([traffic, traffic])
    assert both is not None and both.num_tokens == 2 * traffic.num_tokens
    assert choose(both, SIZES, NOTHING, has_files=False).size == choose(traffic, SIZES, NOTHING, has_files=False).size


@given(traffics, st.integers(0, NUM_ENDS - 1), st.integers(1, 1 << 12))
def test_only_whole_blocks_of_a_shared_beginning_are_found(traffic: Traffic, end: int, num: int) -> None:
    more = tuple(one + num * (at == end) for at, one in enumerate(traffic.ends))
    for size in SIZES:
        lost = cost(dataclasses.replace(traffic, ends=more), size, has_files=False) - cost(
            traffic, size, has_files=False
        )
        assert abs(lost - num * (end * GRAIN % size)) < 1e-3


@given(st.integers(0, 1 << 20), st.integers(1, 1 << 20))
def test_allowed_sizes_divide_the_cache_and_are_worth_a_move(cache_tokens: int, token_bytes: int) -> None:
    found = allowed_sizes(cache_tokens * SIZES[0], token_bytes)
    assert found and all(cache_tokens * SIZES[0] % size == 0 for size in found)
    assert all(size * token_bytes >= LEAST_BYTES for size in found) or len(found) == 1


def test_beginnings_that_end_within_a_block_ask_for_smaller_ones() -> None:
    found = choose(ending(5), SIZES, NOTHING, has_files=False)
    assert found.size == 16
    assert found.because == "it would have saved 8.0 % of the last run's 20000 tokens, over 32"
    assert choose(ending(4), SIZES, NOTHING, has_files=False).size == 32


def test_files_ask_for_larger_blocks() -> None:
    fast = dataclasses.replace(ending(0), token_s=1e-4)
    assert choose(fast, SIZES, NOTHING, has_files=False).size == 32
    assert choose(fast, SIZES, NOTHING, has_files=True).size == 128


def test_unused_slots_ask_for_smaller_blocks_where_the_cache_was_full() -> None:
    roomy = dataclasses.replace(ending(0), unused=0.3, num_hits=10_000)
    assert choose(roomy, SIZES, NOTHING, has_files=False).size == 32
    assert choose(dataclasses.replace(roomy, num_evicted=1), SIZES, NOTHING, has_files=False).size == 16


def test_without_a_run_that_says_enough_the_size_stays() -> None:
    assert choose(None, SIZES, NOTHING, has_files=False).size == USUAL
    assert choose(None, (64, 128), NOTHING, has_files=False).size == 64
    few = dataclasses.replace(ending(5), num_requests=LEAST_REQUESTS - 1, block_size=64)
    found = choose(few, SIZES, NOTHING, has_files=False)
    assert found.size == 64 and "requests say little" in found.because
    assert choose(ending(5), (64, 128), NOTHING, has_files=False).size == 64


def test_an_engine_of_an_earlier_run_counts_for_nothing() -> None:
    found = merged([ending(4), dataclasses.replace(ending(5), block_size=128)])
    assert found == ending(4)
    assert merged([]) is None
