"""Converts the events of the engines' prefix caches to `KvEventBatch`. Pure.

All engines together are one worker, of rank 0: it holds what any of them holds. A router in front sees the blocks of
its own tenant only: others cannot use them, and their tokens are not its business.
"""

from collections.abc import Iterator, Sequence

from sluice.v1 import control_pb2

from sluice_server.services.gateway.cache_events import CacheBatch
from sluice_server.services.gateway.vllm.contract import common_pb2 as common
from sluice_server.services.gateway.vllm.described import scheduler_load
from sluice_server.services.messages.details import CachedBlock
from sluice_server.services.messages.work import ints

HEARTBEAT_S = 1.0  # SMG counts a worker that once reported its load and is silent for 15 s as gone


class KvEventStream:
    """The messages of one subscriber, with the blocks of its tenant."""

    def __init__(self, tenant: str, asked: common.SubscribeKvEventsRequest) -> None:
        self._tenant = tenant
        self._tells_load_first = asked.load_records_before_first_batch
        self._sequence = 0  # of the last batch that was sent
        self._num_loads = 0
        self._num_events = 0

    def batch(self, batch: CacheBatch, load: control_pb2.Load, time_s: float) -> common.KvEventBatch:
        """Converts a batch. Without a block of the tenant it has no events, and its number all the same."""
        self._sequence = batch.sequence
        made = common.KvEventBatch(
            sequence_number=batch.sequence, timestamp=time_s, dp_rank=0, load=self._load(load, load_only=False)
        )
        if batch.snapshot is not None:
            part = batch.snapshot
            made.snapshot.index, made.snapshot.count, made.snapshot.blocks = part.index, part.count, part.num_blocks
        for event in self._events(batch):
            if batch.snapshot is None:
                self._num_events += 1
                event.event_id = self._num_events
            made.events.append(event)
        return made

    def heartbeat(self, load: control_pb2.Load, time_s: float) -> common.KvEventBatch | None:
        """Returns the load alone; None before the first batch, unless the subscriber takes it then."""
        if not self._sequence and not self._tells_load_first:
            return None
        loaded = self._load(load, load_only=True)
        return common.KvEventBatch(sequence_number=self._sequence, timestamp=time_s, dp_rank=0, load=loaded)

    def _events(self, batch: CacheBatch) -> Iterator[common.KvCacheEvent]:
        changes = batch.union
        if changes.is_whole:
            yield common.KvCacheEvent(cleared=common.KvCacheCleared())
        gone = [hash_of(block.name) for block in changes.removed if block.tenant == self._tenant]
        if gone:
            yield common.KvCacheEvent(removed=common.KvBlocksRemoved(block_hashes=gone))
        for chain in chains([block for block in changes.added if block.tenant == self._tenant]):
            parent = hash_of(chain[0].parent) if chain[0].parent else None
            blocks = [_block(one) for one in chain]
            yield common.KvCacheEvent(stored=common.KvBlocksStored(blocks=blocks, parent_block_hash=parent))

    def _load(self, load: control_pb2.Load, *, load_only: bool) -> common.EngineLoad:
        self._num_loads += 1
        loaded = scheduler_load(load)
        return common.EngineLoad(
            running_requests=loaded.num_running_reqs,
            waiting_requests=loaded.num_waiting_reqs,
            token_usage=loaded.token_usage,
            gen_throughput=loaded.gen_throughput,
            sample=self._num_loads,
            load_only=load_only,
        )


def chains(blocks: Sequence[CachedBlock]) -> list[list[CachedBlock]]:
    """Returns the blocks in runs, in each of which every block follows the one before it."""
    found: list[list[CachedBlock]] = []
    for block in blocks:
        if found and block.parent == found[-1][-1].name:
            found[-1].append(block)
        else:
            found.append([block])
    return found


def hash_of(name: bytes) -> int:
    """Returns the beginning of a block's name as the protocol's number."""
    return int.from_bytes(name[:8], "little", signed=True)


def _block(block: CachedBlock) -> common.KvBlock:
    ids = ints(block.ids)
    return common.KvBlock(block_hash=hash_of(block.name), token_ids=ids, block_size=len(ids))
