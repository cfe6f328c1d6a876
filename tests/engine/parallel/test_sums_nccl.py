"""Sums over NCCL's interface; gloo's process group, with tensors of the host, stands in for it."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch
from torch._C import _distributed_c10d as dist
from torch.distributed import is_gloo_available, is_nccl_available

from sluice_server.engine.parallel.sums import LocalSums, SumsBroken
from sluice_server.engine.parallel.sums_nccl import NcclSums, nccl_group
from sluice_server.kernels.cpu import builds
from tests.engine.parallel.test_rank_models import CPU, served
from tests.engine.parallel.test_sums import SHAPE, added, uneven

pytestmark = pytest.mark.skipif(not is_gloo_available(), reason="torch has no gloo")
Result = TypeVar("Result")
PATIENT_S = 60.0


def standing_in(store: dist.Store, rank: int, size: int) -> Any:  # noqa: ANN401 # of torch's untyped groups
    backend: Any = dist.ProcessGroupGloo
    options = backend._Options()
    options._devices = [backend.create_device(hostname="127.0.0.1")]
    options._timeout = timedelta(seconds=PATIENT_S)
    return backend(store, rank, size, options)


def group(path: Path, size: int, shards: int = 0) -> list[NcclSums]:
    """Ranks that are threads of this process."""

    def join(rank: int) -> NcclSums:
        own = standing_in(dist.FileStore(str(path / "store"), size), rank, size)
        return NcclSums(own, rank, size, CPU, shards=shards, timeout_s=PATIENT_S)

    return of_each(range(size), join)


def of_each(each: Sequence[Any], work: Callable[[Any], Result]) -> list[Result]:
    with ThreadPoolExecutor(len(each)) as pool:
        return list(pool.map(work, each))


@pytest.mark.parametrize(("size", "shards"), [(2, 6), (3, 3)])
def test_the_bits_are_those_of_one_rank_with_all_shards(tmp_path: Path, size: int, shards: int) -> None:
    given, start = uneven(shards), uneven(1, seed=1)[0]
    wanted = added(LocalSums(shards), given, start)
    each = group(tmp_path, size, shards)

    def in_room(sums: NcclSums) -> torch.Tensor:
        """What a layer does: it computes where the sums want it."""
        room, own = sums.room(*SHAPE), shards // size
        for part, values in zip(room, given[sums.rank * own :], strict=False):
            part.copy_(values)
        into = start.clone()
        sums.add(into, room)
        return into

    for _ in range(2):
        assert all(torch.equal(found, wanted) for found in of_each(each, lambda sums: added(sums, given, start)))
        assert all(torch.equal(found, wanted) for found in of_each(each, in_room))


def test_columns_are_gathered_at_rank_0_and_ranks_agree(tmp_path: Path) -> None:
    each = group(tmp_path, 3)
    for rows in (6, 1):
        parts = [torch.randn(rows, width) for width in (13, 1, 20)]
        with ThreadPoolExecutor(3) as pool:
            found, *others = pool.map(NcclSums.gather, each, parts, [34] * 3)
        assert found is not None and torch.equal(found, torch.cat(parts, 1)) and others == [None, None]
    assert of_each(each, lambda sums: sums.agree(True)) == [True] * 3
    assert of_each(each, lambda sums: sums.agree(sums.rank != 1)) == [False] * 3


def test_a_rank_may_have_as_many_columns_of_two_vocabularies_while_another_has_not(tmp_path: Path) -> None:
    """As of a model's and a smaller one's that drafts for it. They are asked for once: a recorded step cannot ask."""
    wholes = [torch.randn(2, size) for size in (10, 9, 10)]

    def work(sums: NcclSums) -> tuple[list[torch.Tensor | None], list[int]]:
        found, calls = list[torch.Tensor | None](), list[int]()
        for whole in wholes:
            before = sums.calls
            found.append(sums.gather(whole[:, :5] if sums.rank == 0 else whole[:, 5:], whole.shape[1]))
            calls.append(sums.calls - before)
        return found, calls

    (found, calls), (_, others) = of_each(group(tmp_path, 2), work)
    assert all(one is not None and torch.equal(one, whole) for one, whole in zip(found, wholes, strict=True))
    assert calls == others == [2, 2, 1]


def test_what_rank_0_has_sampled_reaches_all_on_the_device(tmp_path: Path) -> None:
    sampled = torch.tensor([7, -1, 31_999])

    def shared(sums: NcclSums) -> list[int]:
        found: list[int] = sums.share(sampled if sums.rank == 0 else torch.zeros(3, dtype=torch.int64)).tolist()
        return found

    assert of_each(group(tmp_path, 3), shared) == [sampled.tolist()] * 3


def test_a_model_over_two_ranks_has_the_bits_of_one_that_adds_as_many_parts(tmp_path: Path) -> None:
    model = served(tmp_path, ("llama-biases", False))
    builds.set_threads(1)  # the kernels' pool serves one caller
    found, _ = of_each(group(tmp_path, 2, 4), model.logits)
    assert torch.equal(found, model.over(1, 4))


def test_a_rank_that_does_not_come_is_given_up(tmp_path: Path) -> None:
    first = group(tmp_path, 2)[0]
    first.timeout_s = 0.05
    with pytest.raises(SumsBroken, match="a rank of 2 has ended, or did not come to a sum: start the group anew"):
        added(first, uneven(2), torch.zeros(SHAPE))


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match="3 shards cannot be shared out among 2 ranks"):
        NcclSums(standing_in(dist.HashStore(), 0, 1), 0, 2, CPU, shards=3)
    if not is_nccl_available():
        with pytest.raises(ValueError, match="this build of torch has no NCCL: install one for CUDA"):
            nccl_group(dist.HashStore(), 0, 2)
