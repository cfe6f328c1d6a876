"""Ranks with a pretended GPU each, as threads of one process: gloo's process group stands in for NCCL's.

A collective is put into a device's queue: in a capture it is recorded, and repeated by each replay.
"""

import contextlib
import dataclasses
import functools
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._C import _distributed_c10d as dist

from sluice_server.engine.config import EngineConfig
from sluice_server.engine.engine import Engine
from sluice_server.engine.parallel.options import shape_of
from sluice_server.engine.parallel.sums_nccl import NcclSums
from sluice_server.engine.parallel.sums_symmetric import SymmetricSums
from sluice_server.engine.request import Limits
from tests.engine.parallel.peers_memory import ThreadMemory, thread_memories
from tests.engine.parallel.test_sums_nccl import PATIENT_S, standing_in
from tests.engine.parallel.thread_ranks import ThreadPlace, threaded
from tests.pretended_gpu.cuda import PretendedGpu, current_gpu
from tests.pretended_gpu.memory import is_on_device, mark


class Begun:
    """A collective in a device's queue: there is nothing to wait for on the host."""

    def wait(self) -> None:
        """Returns at once."""


@dataclasses.dataclass
class PretendedNccl:
    """Implements `Collectives` on the pretended device of the thread that calls.

    Attributes:
        begun: collectives by name, those of replays too.
    """

    group: Any
    begun: Counter[str] = dataclasses.field(default_factory=Counter)

    def _allgather_base(self, output: Tensor, own: Tensor, options: Any) -> Begun:  # noqa: ANN401 # untyped
        return self._begin("allgather", (output, own), lambda: self.group._allgather_base(output, own, options))

    def broadcast(self, tensors: list[Tensor], options: Any) -> Begun:  # noqa: ANN401 # untyped
        return self._begin("broadcast", tuple(tensors), lambda: self.group.broadcast(tensors, options))

    def _begin(self, name: str, given: tuple[Tensor, ...], begin: Callable[[], Any]) -> Begun:
        assert all(is_on_device(one) and one.is_contiguous() for one in given)
        queue(functools.partial(self._carry_out, name, begin))
        return Begun()

    def _carry_out(self, name: str, begin: Callable[[], Any]) -> None:
        self.begun[name] += 1
        begin().wait()


class PretendedMemory(ThreadMemory):
    """That of a rank with a pretended device: a barrier is put into its queue."""

    def get_buffer(self, rank: int, sizes: Sequence[int], dtype: torch.dtype, storage_offset: int = 0) -> Tensor:
        found = super().get_buffer(rank, sizes, dtype, storage_offset)
        mark(found)
        return found

    def barrier(self, channel: int = 0, timeout_ms: int = 0) -> None:
        queue(functools.partial(super().barrier, channel, timeout_ms))


def queue(work: Callable[[], None]) -> None:
    """Puts work into the queue of this thread's device: in a capture it is recorded."""
    memory = current_gpu().memory
    if memory.recording is None:
        work()
    else:
        memory.record((work, (), {}, None))


@dataclasses.dataclass
class DeviceRanks:
    """An engine over ranks with a pretended GPU each; of each rank, the first is rank 0.

    Attributes:
        gpus: their devices, once they run.
        collectives: their groups.
        memories: what they read of one another, where they do.
        memories: what they read of one another, where they do.
    """

    engine: Engine
    gpus: list[PretendedGpu]
    collectives: list[PretendedNccl]
    sums: list[NcclSums]
    memories: list[PretendedMemory]


@contextlib.contextmanager
def over_gpus(
    gpu: PretendedGpu,
    directory: Path,
    config: EngineConfig,
    draft: Path | None = None,
    limits: Limits | None = None,
    *,
    reach_one_another: bool = False,
) -> Iterator[DeviceRanks]:
    """An engine whose rank 0 has `gpu`, and the other ranks devices of their own. `limits`: see `threaded`.
    `reach_one_another`: whether devices read one another's memory."""
    shape, store = shape_of(config), dist.HashStore()
    each = [shape.of_member(member) for member in range(shape.members)]
    with ThreadPoolExecutor(len(each)) as pool:
        groups = list(pool.map(lambda one: PretendedNccl(standing_in(store, one.rank, one.tensor_size)), each))
    cuda = torch.device("cuda")
    memories = [PretendedMemory(one._each, one._barrier) for one in thread_memories(shape.tensor_size)]

    def sums_of(rank: int) -> NcclSums:
        given = groups[rank], rank, shape.tensor_size, cuda
        named: dict[str, Any] = {"shards": shape.sum_shards, "timeout_s": PATIENT_S}
        return SymmetricSums(*given, memories[rank], **named) if reach_one_another else NcclSums(*given, **named)

    sums = list(map(sums_of, range(shape.tensor_size)))
    places = [ThreadPlace(*given, None) for given in zip(each, sums, strict=True)]
    gpus = [gpu] * len(each)

    @contextlib.contextmanager
    def within(rank: int) -> Iterator[None]:
        with gpu.beside(rank) as own:
            gpus[rank] = own
            yield

    with threaded(directory, config, draft, limits, places, within) as engine:
        yield DeviceRanks(engine, gpus, groups, sums, memories)
