"""Sums over the memory of several devices: the bits of the reference, and nothing beside what they are added to."""

import pytest
import torch
from torch import Tensor

from sluice_server.kernels import gpu, ops
from sluice_server.kernels.reference import peer_sums as reference
from sluice_server.kernels.reference.peer_sums import PeerBuffers
from sluice_server.kernels.triton import peer_sums
from tests.kernels.triton.harness import Guarded, poisoned


def buffers(ranks: int, parts: int, num: int) -> PeerBuffers:
    """Buffers whose sum depends on its order, poisoned behind what is in them."""
    made = torch.Generator().manual_seed(ranks * parts + num)
    each = [poisoned((parts * num + 700,), torch.float32) for _ in range(ranks)]
    for rank, one in enumerate(each):
        values = torch.randn(parts, num, generator=made)
        one[: parts * num].view(parts, num).copy_(values * 10.0 ** (3 * rank % 7 + torch.arange(parts)[:, None]))
    return PeerBuffers(each, torch.tensor([one.data_ptr() for one in each]))


@pytest.mark.parametrize(("ranks", "parts"), [(2, 1), (2, 3), (3, 1), (4, 2), (8, 1)])
@pytest.mark.parametrize("shape", [(1, 1), (3, 171), (2, 512), (5, 300)])
def test_the_bits_are_those_of_the_reference(ranks: int, parts: int, shape: tuple[int, int]) -> None:
    given = buffers(ranks, parts, shape[0] * shape[1])
    kept = [one.clone() for one in given.each]
    into, start = Guarded.of(shape, torch.float32), torch.randn(shape)
    into.tensor.copy_(start)
    wanted = start.clone()
    reference.add_parts_(wanted, given, parts)
    peer_sums.add_parts_(into.tensor, given, parts)
    assert torch.equal(into.check(), wanted) and not torch.equal(wanted, start)
    for one, other in zip(given.each, kept, strict=True):
        assert torch.equal(one.nan_to_num(nan=7.0), other.nan_to_num(nan=7.0)), "what ranks have written was changed"


def test_the_sum_is_taken_from_the_first_rank_on() -> None:
    """With large numbers that cancel each other, in this order alone."""
    given = PeerBuffers([torch.tensor([value]) for value in (1e30, -1e30, 1.0)], torch.zeros(3, dtype=torch.int64))
    given = given._replace(addresses=torch.tensor([one.data_ptr() for one in given.each]))
    for add in (reference.add_parts_, peer_sums.add_parts_):
        into = torch.tensor([1e-8])
        add(into, given, 1)
        assert into.item() == torch.tensor(1.0).add(1e-8).item()


def test_negative_zeros_and_empty_sums_stay() -> None:
    zeros = [torch.full((4,), -0.0) for _ in range(2)]
    given = PeerBuffers(zeros, torch.tensor([one.data_ptr() for one in zeros]))
    into = torch.full((4,), -0.0)
    peer_sums.add_parts_(into, given, 1)
    assert into.signbit().all()
    peer_sums.add_parts_(torch.zeros(0, 4), given, 1)


def test_a_device_takes_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    given, called = buffers(2, 1, 8), list[Tensor]()
    monkeypatch.setattr(peer_sums, "add_parts_", lambda into, *rest: called.append(into))
    into = torch.zeros(8)
    ops.add_parts_(into, given, 1)
    assert into.any() and not called
    monkeypatch.setattr(gpu, "takes", lambda x: True)
    ops.add_parts_(into, given, 1)
    assert called[0] is into
