"""The sums of ranks: their order, what ranks give to them, and ranks that do not come."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from sluice_server.engine.parallel.sums import LocalSums, RankSums, SumsBroken, ThreadSums, check_shards, thread_sums
from tests.engine.parallel.rank_threads import run_ranks

SHAPE = (5, 33)


def uneven(num: int, seed: int = 0, shape: tuple[int, int] = SHAPE) -> list[Tensor]:
    """Tensors whose sum depends on its order."""
    made = torch.Generator().manual_seed(seed)
    return [torch.randn(*shape, generator=made) * 10.0 ** (3 * i % 7) for i in range(num)]


def added(sums: RankSums, given: list[Tensor], start: Tensor) -> Tensor:
    """The start, with the rank's share of what is given added by all."""
    own = sums.shards // sums.size
    into = start.clone()
    sums.add(into, given[sums.rank * own : (sums.rank + 1) * own])
    return into


def in_order(given: list[Tensor], start: Tensor) -> Tensor:
    """What a sum must give: the shards' total, from the first on, and then the start."""
    total = given[0].clone()
    for one in given[1:]:
        total = total + one
    return start + total


@pytest.mark.parametrize("size", [1, 2, 3, 4, 6])
def test_the_bits_of_a_sum_depend_on_the_shards_alone(size: int) -> None:
    given, start = uneven(12), uneven(1, seed=1)[0]
    assert not torch.equal(in_order(given, start), in_order(given[::-1], start))
    for found in run_ranks(thread_sums(size, 12), lambda sums: added(sums, given, start)):
        assert torch.equal(found, in_order(given, start))
    assert torch.equal(added(LocalSums(12), given, start), in_order(given, start))


def test_what_is_given_stays_as_it_is() -> None:
    given = uneven(4)
    kept = [one.clone() for one in given]
    run_ranks(thread_sums(2, 4), lambda sums: added(sums, given, torch.zeros(SHAPE)))
    added(LocalSums(4), given, torch.zeros(SHAPE))
    assert all(torch.equal(one, other) for one, other in zip(given, kept, strict=True))


def test_room_is_there_for_each_shard_of_a_rank() -> None:
    each: list[RankSums] = [*thread_sums(2, 6), LocalSums(3)]
    for sums in each:
        room = sums.room(*SHAPE)
        assert [one.shape for one in room] == [SHAPE] * 3 and room[0].dtype is torch.float32


def test_columns_are_gathered_at_rank_0() -> None:
    parts = [torch.arange(2.0 * width).view(2, width) + 100 * width for width in (3, 1, 4)]
    first, *others = run_ranks(thread_sums(3), lambda sums: sums.gather(parts[sums.rank], 8))
    assert first is not None and torch.equal(first, torch.cat(parts, 1)) and others == [None, None]
    assert torch.equal(LocalSums().gather(parts[0], 3), parts[0])


@pytest.mark.parametrize("unwell", [None, 0, 2])
def test_ranks_agree_whether_all_are_well(unwell: int | None) -> None:
    assert run_ranks(thread_sums(3), lambda sums: sums.agree(sums.rank != unwell)) == [unwell is None] * 3


def test_a_rank_that_fails_ends_the_sum_of_the_others() -> None:
    each = thread_sums(2)

    def work(sums: ThreadSums) -> None:
        if sums.rank == 1:
            raise KeyError("of rank 1")
        with pytest.raises(SumsBroken, match="rank 1 of 2 did not come") as caught:
            sums.add(torch.zeros(SHAPE), [torch.zeros(SHAPE)])
        assert caught.value.rank == 1

    with pytest.raises(KeyError, match="of rank 1"):
        run_ranks(each, work)
    with pytest.raises(SumsBroken):  # a broken group stays broken
        each[0].agree(True)


def test_a_rank_that_does_not_come_is_given_up() -> None:
    each = thread_sums(3, timeout_s=0.01)
    with pytest.raises(SumsBroken, match="rank 1 of 3 did not come"):
        each[0].add(torch.zeros(SHAPE), [torch.zeros(SHAPE)])


SIZES: dict[str, Callable[[ThreadSums], object]] = {
    "rows": lambda sums: sums.add(torch.zeros(2 + sums.rank, 3), [torch.zeros(2 + sums.rank, 3)]),
    "number": lambda sums: sums.add(torch.zeros(2, 3), [torch.zeros(2, 3)] * (1 + sums.rank)),
    "gathered rows": lambda sums: sums.gather(torch.zeros(1 + sums.rank, 3), 6),
}


@pytest.mark.parametrize("work", SIZES.values(), ids=SIZES.keys())
def test_ranks_must_give_the_same_sizes(work: Callable[[ThreadSums], object]) -> None:
    with pytest.raises(SumsBroken, match=r"rank 1 gives .* rank 0 gives"):
        run_ranks(thread_sums(2), work)


@pytest.mark.parametrize(("size", "shards"), [(2, 3), (4, 2), (0, 0), (2, -2)])
def test_shards_must_be_shared_out_evenly(size: int, shards: int) -> None:
    with pytest.raises(ValueError, match=f"{shards} shards cannot be shared out among {size} ranks"):
        check_shards(size, shards)
