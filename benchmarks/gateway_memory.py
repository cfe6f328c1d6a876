"""Measures what cancelled requests leave behind in a gateway: growth per request, once its bounded memories are full.

Three figures, each with its limit: bytes that malloc has given out, blocks that Python's allocator has, and the size of
the process. The size alone says little: holes between what is in use make it grow for a long while.
"""

import dataclasses
from collections.abc import Sequence

from benchmarks import gateway_client as client
from benchmarks.gateway_rig import GatewayRig

GATEWAY = "gateway-0"
AT_ONCE = 32
NUM_WARM = 5000  # requests, after which nothing grows by right: a gateway remembers how 4,096 have ended


@dataclasses.dataclass(frozen=True)
class Growth:
    """The growth per request."""

    malloc_bytes: float
    python_blocks: float
    process_bytes: float

    @property
    def is_leak(self) -> bool:
        """More than noise, and than what grpc.aio keeps itself of a call that is cancelled while it writes: 70 to 230
        bytes (1.85.1). One object that is kept of each request makes a block."""
        return self.malloc_bytes > 400.0 or self.python_blocks > 0.25 or self.process_bytes > 500.0


async def rounds_of_cancels(rig: GatewayRig, num_rounds: int, num: int) -> tuple[list[tuple[str, float]], Growth]:
    """Runs `num` cancels per round after the warm-up. Returns their ids and times, and the memory after each round."""
    cancelled: list[tuple[str, float]] = []
    seen: list[tuple[float, float, float]] = []
    async with client.connected(rig.address) as stubs:
        cancelled += await client.cancel_many(stubs, NUM_WARM, AT_ONCE, num_rounds)
        for seed in range(num_rounds):
            cancelled += await client.cancel_many(stubs, num, AT_ONCE, seed)
            await client.until_idle(rig.address)
            held = await rig.in_use(GATEWAY)
            seen.append((held["malloc_bytes"], held["python_blocks"], rig.rss(GATEWAY)))
    return cancelled, Growth(*[slope(values) / num for values in zip(*seen, strict=True)])


def slope(values: Sequence[float]) -> float:
    """The rise from one value to the next, by least squares."""
    mean_x, mean_y = (len(values) - 1) / 2, sum(values) / len(values)
    rise = sum((x - mean_x) * (y - mean_y) for x, y in enumerate(values))
    return rise / sum((x - mean_x) ** 2 for x in range(len(values)))
