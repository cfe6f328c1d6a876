"""What ranks have in parts is joined where they compute, though it comes from the host."""

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from sluice_server.engine.parallel.joined import joined, joined_digest
from sluice_server.engine.parallel.sums import LocalSums, RankSums, thread_sums
from tests.engine.parallel.rank_threads import run_ranks

META = torch.device("meta")


class ElsewhereSums(LocalSums):
    """Sums of a rank on a device that is not the host; what is added must be there."""

    def room(self, rows: int, width: int) -> Sequence[Tensor]:
        return [torch.empty(rows, width, device=META)]

    def add(self, into: Tensor, partials: Sequence[Tensor], *, is_exact: bool = False) -> None:
        assert {one.device for one in (into, *partials)} == {META}


def test_values_of_the_host_are_joined_on_the_device() -> None:
    assert joined(torch.ones(2, 3), ElsewhereSums()).device == META


@pytest.mark.parametrize("width", [3, 64])
def test_all_ranks_have_the_digest_of_all(width: int) -> None:
    def work(sums: RankSums) -> str:
        return joined_digest(bytes([sums.rank, 255, 7]), width, sums)

    first, *others = run_ranks(thread_sums(3), work)
    assert others == [first] * 2 and len(bytes.fromhex(first)) == 3
