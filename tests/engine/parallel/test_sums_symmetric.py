"""Sums over memory that ranks read of one another; threads and their memory stand in for GPUs, gloo for NCCL."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._C import _distributed_c10d as dist
from torch.distributed import is_gloo_available

from sluice_server.engine.parallel.sums import LocalSums, RankSums, SumsBroken
from sluice_server.engine.parallel.sums_nccl import NcclSums
from sluice_server.engine.parallel.sums_symmetric import BUFFER_FLOATS, SymmetricSums, is_as_gathered
from sluice_server.engine.worker.device import CudaDevice
from sluice_server.kernels import ops
from sluice_server.kernels.cpu import builds
from sluice_server.kernels.reference.peer_sums import PeerBuffers
from tests.engine.parallel.peers_memory import ThreadMemory, thread_memories
from tests.engine.parallel.test_rank_models import CPU, served
from tests.engine.parallel.test_sums import SHAPE, added, in_order, uneven
from tests.engine.parallel.test_sums_nccl import PATIENT_S, of_each, standing_in
from tests.engine.worker.host_device import HostDevice
from tests.pretended_gpu.cuda import current_gpu, pretend

pytestmark = pytest.mark.skipif(not is_gloo_available(), reason="torch has no gloo")


def group(path: Path, size: int, shards: int = 0) -> list[SymmetricSums]:
    """Ranks that are threads of this process."""
    memories = thread_memories(size)

    def join(rank: int) -> SymmetricSums:
        own = standing_in(dist.FileStore(str(path / "store"), size), rank, size)
        return SymmetricSums(own, rank, size, CPU, memories[rank], shards=shards, timeout_s=PATIENT_S)

    return of_each(range(size), join)


def memory_of(sums: SymmetricSums) -> ThreadMemory:
    assert isinstance(sums._memory, ThreadMemory)
    return sums._memory


def in_room(sums: RankSums, given: list[Tensor], start: Tensor) -> Tensor:
    """As `added`, but as a layer does it: it computes where the sums want it."""
    own, into = sums.shards // sums.size, start.clone(memory_format=torch.preserve_format)
    room = sums.room(*given[0].shape)
    for part, values in zip(room, given[sums.rank * own :], strict=False):
        part.copy_(values)
    sums.add(into, room)
    return into


def of_all(each: list[SymmetricSums], way: Callable[..., Tensor], given: list[Tensor], start: Tensor) -> list[Tensor]:
    return of_each(each, lambda sums: way(sums, given, start))


@pytest.mark.parametrize(("size", "shards"), [(2, 2), (2, 6), (3, 3), (4, 8)])
@pytest.mark.parametrize("way", [in_room, added])
def test_the_bits_are_those_of_one_rank_with_all_shards(
    tmp_path: Path, size: int, shards: int, way: Callable[..., Tensor]
) -> None:
    """Decode rows and others, one sum behind another, into a tensor that is not empty."""
    each = group(tmp_path, size, shards)
    for seed, (rows, width) in enumerate([(1, 1), (8, 1024), (5, 33), (64, 256), (1, 4096)]):
        given, start = uneven(shards, seed, (rows, width)), uneven(1, 99, (rows, width))[0]
        wanted = in_order(given, start)
        assert rows * width == 1 or shards == 2 or not torch.equal(in_order(given[::-1], start), wanted)
        for found in of_all(each, way, given, start):
            assert torch.equal(found, wanted)
    assert len({one.calls for one in each}) == 1


def test_what_does_not_fit_into_a_buffer_goes_over_nccl(tmp_path: Path) -> None:
    each = group(tmp_path, 2, 4)
    rows = BUFFER_FLOATS // 2 // 1024
    for num, barriers in ((rows, 2), (rows + 1, 0)):
        given, start = uneven(4, 0, (num, 1024)), torch.zeros(num, 1024)
        for way in (in_room, added):
            before = [memory_of(one).barriers for one in each]
            for found in of_all(each, way, given, start):
                assert torch.equal(found, in_order(given, start))
            assert [memory_of(one).barriers - other for one, other in zip(each, before, strict=True)] == [barriers] * 2


@pytest.mark.parametrize(
    "make", [lambda shape: torch.ones(shape[::-1]).t(), lambda shape: torch.ones(shape, dtype=torch.bfloat16)]
)
def test_sums_into_other_tensors_have_the_bits_of_nccls(tmp_path: Path, make: Callable[[Any], Tensor]) -> None:
    each, given = group(tmp_path, 2, 4), uneven(4)
    wanted = make(SHAPE)
    LocalSums(4).add(wanted, given)
    for found in of_each(each, lambda sums: in_room(sums, given, make(SHAPE))):
        assert torch.equal(found, wanted)


def test_room_that_was_not_used_is_given_again(tmp_path: Path) -> None:
    """As where a layer fails between the two on all ranks."""
    each, given = group(tmp_path, 2), uneven(2)

    def work(sums: SymmetricSums) -> Tensor:
        sums.room(7, 11)
        in_room(sums, given, torch.zeros(SHAPE))
        sums.room(*given[0].shape)[0].fill_(torch.nan)
        return in_room(sums, given, torch.ones(SHAPE))

    assert all(torch.equal(found, in_order(given, torch.ones(SHAPE))) for found in of_each(each, work))


def test_a_model_over_two_ranks_has_the_bits_of_one_that_adds_as_many_parts(tmp_path: Path) -> None:
    model = served(tmp_path, ("llama-biases", False))
    builds.set_threads(1)  # the kernels' pool serves one caller
    each = group(tmp_path, 2, 4)
    found, _ = of_each(each, model.logits)
    assert torch.equal(found, model.over(1, 4)) and memory_of(each[0]).barriers > 0


def test_a_rank_that_does_not_come_is_given_up(tmp_path: Path) -> None:
    first = group(tmp_path, 2)[0]
    first.timeout_s = 0.05
    with pytest.raises(SumsBroken, match="a rank of 2 has ended, or did not come to a sum: start the group anew"):
        added(first, uneven(2), torch.zeros(SHAPE))


@dataclasses.dataclass
class Watched:
    """What a device does with the buffers of a rank, in the order of its queue: `barrier`, or a use and a buffer."""

    log: list[tuple[str, int]] = dataclasses.field(default_factory=list)

    def note(self, what: str, address: int = 0) -> None:
        """Puts a note into the queue: in a capture it is recorded, and made by each replay."""
        recording = current_gpu().memory.recording
        if recording is None:
            self.log.append((what, address))
        else:
            recording.append((lambda: self.log.append((what, address)), (), {}, None))

    def check(self) -> int:
        """Checks that no rank writes what another may still read, nor reads what another may not have written: between
        one device's doing and another's lies a barrier, all ranks' queues being equal. Returns the number of sums."""
        met, written, read = 0, dict[int, int](), dict[int, int]()
        for what, address in self.log:
            if what == "barrier":
                met += 1
            elif what == "write":
                assert read.get(address, -1) < met, f"sum {len(read)} may be read while it is written over"
                written[address] = met
            else:
                assert written[address] < met, "a sum is read that others may not have written"
                read[address] = met
        return sum(what == "read" for what, _ in self.log)


class WatchedMemory(ThreadMemory):
    """That of a rank whose device is watched."""

    def __init__(self, watched: Watched) -> None:
        (first,) = thread_memories(1)
        super().__init__([*first._each] * 2, first._barrier)
        self._watched = watched

    def barrier(self, channel: int = 0, timeout_ms: int = 0) -> None:
        self._watched.note("barrier")


@pytest.mark.parametrize("nums", [(1, 1), (1, 2), (3, 3), (4, 1), (0, 3)])
def test_one_barrier_each_keeps_sums_of_recorded_steps_apart(
    nums: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps with so many sums, recorded one behind the other, replayed in every order, with sums that are not recorded
    between them."""
    watched = Watched()

    def read(into: Tensor, buffers: PeerBuffers, parts: int) -> None:
        watched.note("read", buffers.each[0].data_ptr())

    monkeypatch.setattr(ops, "add_parts_", read)
    with pretend():
        cuda = torch.device("cuda")
        device = CudaDevice(cuda)
        sums = SymmetricSums(standing_in(dist.HashStore(), 0, 1), 0, 2, cuda, WatchedMemory(watched))
        into = torch.zeros(2, 3, device="cuda")

        def add(num: int) -> None:
            for _ in range(num):
                room = sums.room(2, 3)
                watched.note("write", room[0].data_ptr())
                sums.add(into, room)

        short, long = (device.capture(lambda num=num: add(num)) for num in nums)  # type: ignore[misc]
        for step in (short, short, long, long, short, long, lambda: add(2), short, lambda: add(1), long):
            step()
        watched.check()
        watched.log.clear()
        long()
        assert watched.check() == nums[1]
        assert sum(what == "barrier" for what, _ in watched.log) == nums[1] + 1


def test_a_trial_tells_memory_that_is_not_shared(tmp_path: Path) -> None:
    each = group(tmp_path, 2, 4)
    assert of_each(each, lambda sums: is_as_gathered(sums, plain(sums), HostDevice())) == [True, True]
    strange = torch.zeros(BUFFER_FLOATS)  # what rank 1 reads of rank 0
    each[1]._buffers = [one._replace(each=[strange, one.each[1]]) for one in each[1]._buffers]
    assert of_each(each, lambda sums: is_as_gathered(sums, plain(sums), HostDevice())) == [True, False]


def plain(sums: SymmetricSums) -> NcclSums:
    """The same ranks without memory of one another."""
    return NcclSums(sums._group, sums.rank, sums.size, CPU, shards=sums.shards, timeout_s=PATIENT_S)
