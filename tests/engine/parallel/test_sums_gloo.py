"""Sums over gloo: order, roundings on the way, ranks that end or do not come, and who listens where."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import psutil
import pytest
import torch
from torch._C import _distributed_c10d as dist
from torch.distributed import is_gloo_available

from sluice_server.engine.parallel.sums import LocalSums, SumsBroken
from sluice_server.engine.parallel.sums_gloo import DTYPES, GROUP, GlooSums
from tests.engine.parallel.test_sums import SHAPE, added, uneven

pytestmark = pytest.mark.skipif(not is_gloo_available(), reason="torch has no gloo")
Result = TypeVar("Result")
PATIENT_S = 60.0


def group(path: Path, size: int, shards: int = 0, dtype: str = "float32") -> list[GlooSums]:
    """Ranks that are threads of this process."""

    def join(rank: int) -> GlooSums:
        store = dist.FileStore(str(path / "store"), size)
        return GlooSums(store, rank, size, "127.0.0.1", shards=shards, dtype=dtype, timeout_s=PATIENT_S)

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(join, range(size)))


def of_each(each: Sequence[GlooSums], work: Callable[[GlooSums], Result]) -> list[Result]:
    with ThreadPoolExecutor(len(each)) as pool:
        return list(pool.map(work, each))


@pytest.mark.parametrize(("size", "shards"), [(2, 6), (3, 3), (3, 6)])
def test_the_bits_are_those_of_one_rank_with_all_shards(tmp_path: Path, size: int, shards: int) -> None:
    given, start = uneven(shards), uneven(1, seed=1)[0]
    wanted = added(LocalSums(shards), given, start)
    each = group(tmp_path, size, shards)
    for _ in range(3):
        assert all(torch.equal(found, wanted) for found in of_each(each, lambda sums: added(sums, given, start)))
    assert all(sums.seconds > 0 for sums in each)


@pytest.mark.parametrize(("dtype", "error"), [("bfloat16", 2.0**-8), ("int8", 1 / 127)])
def test_sums_that_travel_rounded_are_alike_on_all_ranks(tmp_path: Path, dtype: str, error: float) -> None:
    given, start = uneven(6), torch.zeros(SHAPE)
    exact = added(LocalSums(6), given, start)
    first, *others = of_each(group(tmp_path, 3, 6, dtype), lambda sums: added(sums, given, start))
    assert all(torch.equal(first, other) for other in others)
    allowed = sum(one.abs().max() for one in given) * error
    assert 0 < float((first - exact).abs().max()) < float(allowed)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num", [1, GROUP, GROUP + 1, 1000])
def test_what_is_unpacked_is_what_was_packed_but_for_rounding(dtype: str, num: int) -> None:
    numbers = torch.randn(num, generator=torch.Generator().manual_seed(num))
    form = DTYPES[dtype]
    packed = form.pack(numbers)
    assert packed.dtype is torch.uint8
    found = form.unpack(packed, num)
    assert found.shape == numbers.shape and float((found - numbers).abs().max()) <= float(numbers.abs().max()) / 100
    assert not form.unpack(form.pack(torch.zeros(num)), num).any()


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_no_number_stays_none(dtype: str, bad: float) -> None:
    numbers = torch.ones(3 * GROUP)
    numbers[GROUP + 3] = bad
    form = DTYPES[dtype]
    found = form.unpack(form.pack(numbers), len(numbers))
    assert not found[GROUP + 3].isfinite() and torch.equal(found[:GROUP], numbers[:GROUP])


def test_columns_are_gathered_at_rank_0_and_ranks_agree(tmp_path: Path) -> None:
    parts = [torch.randn(6, width) for width in (13, 1, 20)]
    each = group(tmp_path, 3)
    found, *others = of_each(each, lambda sums: sums.gather(parts[sums.rank], 34))
    assert found is not None and torch.equal(found, torch.cat(parts, 1)) and others == [None, None]
    assert of_each(each, lambda sums: sums.agree(True)) == [True] * 3
    assert of_each(each, lambda sums: sums.agree(sums.rank != 1)) == [False] * 3

    def uneven_rows(sums: GlooSums) -> None:
        with pytest.raises(SumsBroken, match="rank 2 gives 1 rows, rank 0 gives 0"):
            sums.gather(torch.zeros(sums.rank // 2, 3), 9)

    of_each(each, uneven_rows)


def test_a_rank_that_does_not_come_is_given_up(tmp_path: Path) -> None:
    each = group(tmp_path, 2)
    each[0].timeout_s = 0.05
    with pytest.raises(SumsBroken, match=r"did not come to a sum within 0\.05 s: start the group anew"):
        added(each[0], uneven(2), torch.zeros(SHAPE))


def test_a_group_that_is_not_whole_is_given_up(tmp_path: Path) -> None:
    store = dist.FileStore(str(tmp_path / "store"), 2)
    with pytest.raises(SumsBroken, match=r"a rank of 2 has ended, or did not come to a sum within 0\.05 s"):
        GlooSums(store, 0, 2, "127.0.0.1", timeout_s=0.05)


def test_what_does_not_fit_is_refused() -> None:
    store = dist.HashStore()
    with pytest.raises(ValueError, match="sums cannot travel as 'int4': take float32, bfloat16, int8"):
        GlooSums(store, 0, 2, "127.0.0.1", dtype="int4")
    with pytest.raises(ValueError, match="3 shards cannot be shared out among 2 ranks"):
        GlooSums(store, 0, 2, "127.0.0.1", shards=3)


def test_ranks_listen_on_the_address_that_they_are_told_alone(tmp_path: Path) -> None:
    each = group(tmp_path, 2)
    own = [one.laddr.ip for one in psutil.Process().net_connections() if one.status == psutil.CONN_LISTEN]
    assert own and set(own) == {"127.0.0.1"} and each
