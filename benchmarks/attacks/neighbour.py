"""A well-behaved client: requests of one token on the connection that it has, and on fresh ones, and what they take."""

import asyncio
import dataclasses
import random
import time

import grpc
from sluice.v1 import inference_pb2_grpc

from benchmarks import gateway_client as client

EVERY_S, FRESH_EVERY_S = 0.02, 0.1
TIMEOUT_S = 30.0
LOCAL = (("grpc.use_local_subchannel_pool", 1),)


@dataclasses.dataclass
class SeenRequests:
    """Seconds of each request that went well, and how the others ended."""

    connected_s: list[float] = dataclasses.field(default_factory=list)
    fresh_s: list[float] = dataclasses.field(default_factory=list)
    errors: list[str] = dataclasses.field(default_factory=list)

    def figures(self) -> dict[str, object]:
        """Milliseconds."""
        return {
            "p50_ms": at(self.connected_s, 0.5),
            "p99_ms": at(self.connected_s, 0.99),
            "fresh_p50_ms": at(self.fresh_s, 0.5),
            "fresh_p99_ms": at(self.fresh_s, 0.99),
            "requests": len(self.connected_s) + len(self.fresh_s) + len(self.errors),
            "errors": len(self.errors),
        }


def at(values: list[float], share: float) -> float:
    """Nearest rank, in milliseconds; -1 of nothing."""
    ordered = sorted(values)
    return round(ordered[min(len(ordered) - 1, int(share * len(ordered)))] * 1e3, 2) if ordered else -1.0


async def watch(address: str, seconds: float, authority: bytes = b"") -> SeenRequests:
    """Ask for so long, one request after the other and some on fresh connections beside them; over TLS if there is an
    authority."""
    seen, end_s, rng = SeenRequests(), time.monotonic() + seconds, random.Random(1)

    async def ask(channel: grpc.aio.Channel, into: list[float]) -> None:
        start_s = time.monotonic()
        try:
            async with asyncio.timeout(TIMEOUT_S):
                one = await client.read(inference_pb2_grpc.InferenceServiceStub(channel), 1, rng)
        except TimeoutError:
            seen.errors.append("timeout")
            return
        if one.error:
            seen.errors.append(one.error)
        else:
            into.append(time.monotonic() - start_s)

    async def connected() -> None:
        async with _channel(address, authority) as channel:
            while time.monotonic() < end_s:
                await ask(channel, seen.connected_s)
                await asyncio.sleep(EVERY_S)

    async def fresh() -> None:
        while time.monotonic() < end_s:
            async with _channel(address, authority) as channel:
                await ask(channel, seen.fresh_s)
            await asyncio.sleep(FRESH_EVERY_S)

    await asyncio.gather(connected(), fresh())
    return seen


def _channel(address: str, authority: bytes) -> grpc.aio.Channel:
    if not authority:
        return grpc.aio.insecure_channel(address, options=LOCAL)
    return grpc.aio.secure_channel(address, grpc.ssl_channel_credentials(authority), options=LOCAL)
