"""Sums of ranks whose GPUs read one another's memory (`peer_memory`).

A layer writes its partial sums where all devices can read them. Behind a barrier between the devices one kernel on each
reads those of all ranks and adds them in their order, in float32: the bits are those of `NcclSums`, and of a processor.
What does not fit into a buffer goes over NCCL, as do logits and ids.

Each rank has two buffers, and sums take turns. A rank that writes its sum n + 2 has the barrier of sum n + 1 behind it;
every other rank puts that barrier into its queue behind the kernel which reads sum n; so nobody reads any more what is
written over. One barrier for each sum is enough as long as no two sums in a row have the same buffer. A recorded step
has its buffers for ever, and what is computed before a replay is not known while it is recorded: so the first sum of a
recorded step, and every sum outside of one, has another barrier before its layer writes, and takes the first buffer.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from sluice_server.engine.parallel.peer_memory import PeerMemory
from sluice_server.engine.parallel.sums import TIMEOUT_S
from sluice_server.engine.parallel.sums_nccl import Collectives, NcclSums
from sluice_server.engine.worker.device import Device
from sluice_server.kernels import ops
from sluice_server.kernels.reference.peer_sums import PeerBuffers

BUFFER_FLOATS = 1 << 17  # of a rank's partial sums that are read directly; NCCL is better at more
BUFFERS = 2
TRIAL = ((1, 1000), (3, 4096), (2, 7))  # rows and width of the sums of a trial


class SymmetricSums(NcclSums):
    """The sums of one rank on a device that reads the memory of the others'; see the module."""

    def __init__(  # noqa: PLR0913 # what a group is made of
        self,
        group: Collectives,
        rank: int,
        size: int,
        device: torch.device,
        memory: PeerMemory,
        *,
        shards: int = 0,
        timeout_s: float = TIMEOUT_S,
    ) -> None:
        """`memory`: `BUFFERS` · `BUFFER_FLOATS` float32 of each rank. `shards` 0 is one for each rank. Raises
        ValueError for numbers that do not fit."""
        super().__init__(group, rank, size, device, shards=shards, timeout_s=timeout_s)
        self._memory = memory
        self._buffers = [_buffers(memory, size, turn, device) for turn in range(BUFFERS)]
        self._turn = 0
        self._was_recorded = False  # the sum before
        self._shared: Sequence[Tensor] = ()  # room in a buffer, as it was given last

    def room(self, rows: int, width: int) -> Sequence[Tensor]:
        """Implements `RankSums.room`: where other devices read it, if it fits."""
        parts = self.shards // self.size
        if parts * rows * width > BUFFER_FLOATS:
            return super().room(rows, width)
        is_recorded = self.device.type == "cuda" and torch.cuda.is_current_stream_capturing()
        if not (is_recorded and self._was_recorded):  # before a capture, its body runs unrecorded: see `Device.capture`
            self._put(self._meet)
            self._turn = 0
        self._was_recorded = is_recorded
        own = self._buffers[self._turn].each[self.rank]
        self._base = own[: parts * rows * width].view(parts, rows, width)
        self._room = self._shared = self._base.unbind()
        return self._shared

    def add(self, into: Tensor, partials: Sequence[Tensor], *, is_exact: bool = False) -> None:
        """Implements `RankSums.add`."""
        if partials is not self._shared:
            partials = self._moved(partials)
        if partials is not self._shared or into.dtype is not torch.float32 or not into.is_contiguous():
            super().add(into, partials, is_exact=is_exact)
            return
        self._put(self._meet)
        ops.add_parts_(into, self._buffers[self._turn], len(partials))
        self._turn = (self._turn + 1) % BUFFERS

    def _moved(self, partials: Sequence[Tensor]) -> Sequence[Tensor]:
        """Returns partial sums in the room that there is for them, unless they lie there already."""
        if partials is self._room:
            return partials
        room = self.room(*partials[0].shape)
        for part, values in zip(room, partials, strict=True):
            part.copy_(values)
        return room

    def _meet(self) -> None:
        """Begins a barrier of all ranks' devices."""
        self._memory.barrier(0, int(1000 * self.timeout_s))


def _buffers(memory: PeerMemory, size: int, turn: int, device: torch.device) -> PeerBuffers:
    """Returns the buffers of all ranks that have a turn."""
    first = turn * BUFFER_FLOATS
    each = [memory.get_buffer(rank, (BUFFER_FLOATS,), torch.float32, first) for rank in range(size)]
    begin = [address + first * torch.float32.itemsize for address in memory.buffer_ptrs]
    return PeerBuffers(each, torch.tensor(begin, dtype=torch.int64, device=device))


def is_as_gathered(sums: SymmetricSums, gathered: NcclSums, device: Device) -> bool:
    """Returns whether sums have the bits of NCCL's on this rank, recorded and not; waits for the device.

    Ranks that are not connected as CUDA says would give others, or none: then the device has failed.
    """
    made = torch.Generator().manual_seed(sums.rank)
    parts = sums.shards // sums.size
    given = [torch.randn(parts, *shape, generator=made).to(sums.device) for shape in TRIAL]
    wanted, found = ([torch.zeros(shape, device=sums.device) for shape in TRIAL] for _ in range(2))

    def add_all() -> None:
        for into, values in zip(found, given, strict=True):
            sums.add(into.zero_(), values.unbind())

    for into, values in zip(wanted, given, strict=True):
        gathered.add(into, values.unbind())
    replay, is_equal = device.capture(add_all), True
    for step in (add_all, replay, replay):
        step()
        is_equal &= all(torch.equal(one, other) for one, other in zip(found, wanted, strict=True))
    return is_equal
