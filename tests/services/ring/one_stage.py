"""One stage in a ring of real sockets: sends it messages and collects what it emits, until a probe follows."""

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path

import zmq

from sluice_server.services.messages.messages import Message
from sluice_server.services.messages.processes import Probe, Role
from sluice_server.services.ring.loop import RingLoop
from sluice_server.services.ring.sockets import Inbox, Outbox, Peer
from sluice_server.services.ring.stage import Stage

NEXT = "next"
LIMIT = 3 << 20


async def passed_on(
    role: Role,
    make: Callable[[RingLoop], Stage],
    messages: Sequence[Message],
    directory: Path,
    is_done: Callable[[list[Message]], bool],
) -> list[Message]:
    """The messages that a stage emits until `is_done`, and those before a probe that is sent then."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    before, behind = f"ipc://{directory}/in", f"ipc://{directory}/out"
    sink = Inbox(context, behind, LIMIT)
    ring = RingLoop(role, f"{role}-0", before, {NEXT: behind}, LIMIT)
    source = Outbox(context, Peer(ring.process_id, before), "before", 1, LIMIT)
    came: list[Message] = []

    async def until(condition: Callable[[], bool]) -> None:
        while not condition():
            source.flush()
            came.extend(sink.drain())
            await asyncio.sleep(0.001)

    try:
        ring.start(make(ring))
        async with asyncio.timeout(20):
            for message in messages:
                source.put(message)
                await until(lambda: not source.backlog)
            await until(lambda: is_done(came))
            if role is Role.GATEWAY:
                return came  # where a probe ends
            source.put(Probe(NEXT, 1, (NEXT,)))
            await until(lambda: any(isinstance(one, Probe) for one in came))
    finally:
        ring.stop()
        source.close()
        sink.close()
        context.term()
    return [one for one in came if not isinstance(one, Probe)]
