"""Streams what gateways in front need of a model: the tokenizer's files, and cache events."""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable

from sluice.v1 import control_pb2

from sluice_server.engine.errors import ServiceError, unsupported
from sluice_server.services.gateway.access.metadata import Context
from sluice_server.services.gateway.cache_events import CacheBatch, CacheEvents
from sluice_server.services.gateway.calls.refusal import refuse
from sluice_server.services.gateway.requests.manager import RequestManager
from sluice_server.services.messages.work import ints

LONG_S = 3600.0  # between two looks for news


class Artifacts:
    """The tokenizer's files and the cache events of one model, for every protocol."""

    def __init__(self, manager: RequestManager, events: CacheEvents) -> None:
        self.events = events
        self._manager = manager
        self._archiving = asyncio.Lock()  # one archive is in memory at a time

    async def write_tokenizer(self, context: Context, write: Callable[[bytes, str], Awaitable[None]]) -> None:
        """Passes each chunk of the files to `write`, the last one with the digest, "" with the others."""
        async with self._archiving:
            try:
                archive = await asyncio.to_thread(self._manager.settings.model.tokenizer.archive)
            except ServiceError as error:
                await refuse(context, error)
                raise
            chunks = archive.chunks()
            for at, data in enumerate(chunks, start=1):
                await write(data, archive.digest if at == len(chunks) else "")

    async def subscribe_kv_events(self, request: control_pb2.SubscribeKvEventsRequest, context: Context) -> None:
        """SubscribeKvEvents: writes what the engines' prefix caches hold, of all tenants."""
        await self.check_events(context)
        following = self.events.follow(request.start_sequence_number, LONG_S)
        async with contextlib.aclosing(following):
            async for batch in following:
                if batch is not None:
                    await context.write(_response(batch))

    async def check_events(self, context: Context) -> None:
        """Ends the call unless engines report their caches."""
        if not self._manager.settings.kv_events:
            await refuse(context, unsupported("SubscribeKvEvents", "start the server with --kv-events to have these"))


def _response(batch: CacheBatch) -> control_pb2.SubscribeKvEventsResponse:
    made = control_pb2.SubscribeKvEventsResponse(
        sequence_number=batch.sequence,
        engine_id=batch.engine_id,
        cleared=batch.is_whole,
        removed=[block.name for block in batch.removed],
    )
    for block in batch.added:
        made.added.add(name=block.name, parent=block.parent, tenant=block.tenant, token_ids=ints(block.ids))
    if batch.snapshot is not None:
        part = batch.snapshot
        made.snapshot.index, made.snapshot.count, made.snapshot.blocks = part.index, part.count, part.num_blocks
    return made
