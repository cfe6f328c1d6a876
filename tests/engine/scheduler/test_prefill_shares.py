"""How the prompts share a step's budget."""

import dataclasses
from typing import cast

from sluice_server.engine.scheduler.prefill_shares import PrefillRoundRobin
from sluice_server.engine.scheduler.sequence import Sequence


@dataclasses.dataclass
class Fake:
    """The fields of a sequence that the shares depend on."""

    num_missing: int
    last_step: int = 0
    is_pooled: bool = False
    is_resumed: bool = False


def share(prefill_shares: PrefillRoundRobin, prompts: list[Fake], budget: int) -> list[int]:
    """The tokens of each prompt, in the order of `prompts`."""
    shares = prefill_shares.share(cast(list[Sequence], prompts), budget)
    assert sum(num for _, num in shares) <= budget and all(num > 0 for _, num in shares)
    given = {id(one): num for one, num in shares}
    return [given.get(id(one), 0) for one in prompts]


def test_prompts_that_end_go_in_order_and_the_first_that_does_not_fit_gets_the_rest() -> None:
    assert share(PrefillRoundRobin(), [Fake(40), Fake(50), Fake(60)], 100) == [40, 50, 10]


def test_long_ones_share_equally_and_who_was_served_longest_ago_goes_first() -> None:
    assert share(PrefillRoundRobin(), [Fake(900)] * 0 + [Fake(900), Fake(900), Fake(900), Fake(900)], 128) == [32] * 4
    assert share(PrefillRoundRobin(), [Fake(900, 5), Fake(900, 3), Fake(900, 4)], 40) == [0, 32, 8]


def test_a_short_one_has_every_other_step_for_itself() -> None:
    prefill_shares, long = PrefillRoundRobin(), Fake(900)
    assert share(prefill_shares, [long, Fake(20)], 128) == [0, 20]
    assert share(prefill_shares, [long, Fake(20)], 128) == [108, 20]
    assert share(prefill_shares, [long, Fake(20)], 128) == [0, 20]
    assert share(prefill_shares, [long], 128) == [128]


def test_short_ones_never_starve_a_long_one() -> None:
    prefill_shares, long, given = PrefillRoundRobin(), Fake(10_000), 0
    for _ in range(10):
        given += share(prefill_shares, [*(Fake(100) for _ in range(5)), long], 128)[-1]
    assert given >= 5 * 64


def test_pooled_prompts_have_a_share_of_their_own_beside_decodes() -> None:
    def given(*prompts: Fake, budget: int = 100, most_pooled: int = 8) -> list[int]:
        found = PrefillRoundRobin().share_beside(cast(list[Sequence], list(prompts)), budget, 4, most_pooled)
        return [num for _, num in found]

    flood = [Fake(6, is_pooled=True) for _ in range(9)]
    assert given(*flood) == [6, 2]
    assert given(Fake(40), *flood, Fake(900)) == [6, 2, 40]  # a step for prompts that end
    assert given(Fake(40), *flood, budget=3) == [2, 1]
    assert given(*flood, budget=3) == [3]
    assert given(Fake(1), *flood, budget=1) == [1] and given(*flood, Fake(50), most_pooled=80, budget=20) == [6, 4, 10]


def test_resumed_requests_have_a_share_beside_decodes() -> None:
    def given(*prompts: Fake, num_decodes: int, budget: int = 120, most_pooled: int = 0) -> list[int]:
        sequences = cast(list[Sequence], list(prompts))
        found = PrefillRoundRobin().share_beside(sequences, budget, num_decodes, most_pooled)
        return [num for _, num in found]

    resumed, long = [Fake(50, is_resumed=True) for _ in range(4)], Fake(900, is_resumed=True)
    assert given(*resumed, num_decodes=4) == [50, 10]  # half of the budget for half of the sequences
    assert given(*resumed, num_decodes=8) == [40]
    assert given(*resumed, num_decodes=99) == [30]  # a quarter at least
    assert given(long, num_decodes=1, budget=2) == given(long, num_decodes=9, budget=2) == [1]
    assert given(*resumed, num_decodes=0) == [50, 50, 20]
    assert given(Fake(40), *resumed, Fake(90), num_decodes=8) == [40, 40]  # others have what is left; those that end
    assert given(Fake(900), *resumed, num_decodes=1) == [50, 10, 60]  # half of it for others
    assert given(Fake(8, is_pooled=True), *resumed, num_decodes=8, most_pooled=5) == [5, 40]
