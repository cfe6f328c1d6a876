"""A short soak test: very many requests, a fifth of them cancelled, some past their deadline; nothing grows (L4)."""

import asyncio
import random

import grpc
import psutil
import pytest
from sluice.v1 import inference_pb2, inference_pb2_grpc

from tests.faults.faulty import faults
from tests.faults.test_faults_kill import nothing_is_left
from tests.system.service import Service, serve, spec, wait_until

AT_ONCE = 48
WARM_UP = 0.4  # of all: caches fill, pools grow
MIB_PER_10K = 1.0
# All of its pages are in use after the warm-up: those of the default are taken one by one, for hours.
SMALL_POOL = ("--kv-cache-tokens", "32768")
MIB = 1 << 20


def memory(service: Service) -> dict[str, float]:
    """MiB of private memory of each process."""
    return {name: child.memory_full_info().uss / MIB for name, child in service.children().items()}


def things(child: psutil.Process) -> tuple[int, int]:
    """The numbers of threads and file descriptors."""
    return child.num_threads(), child.num_fds()


async def one(stub: "inference_pb2_grpc.InferenceServiceAsyncStub", rng: random.Random) -> None:
    way = rng.random()
    prompt = [rng.randrange(4000) for _ in range(rng.randint(1, 12))]
    request = inference_pb2.StreamGenerateRequest(spec=spec(prompt, rng.randint(1, 6)))
    call = stub.StreamGenerate(request, timeout=rng.random() * 0.02 if way < 0.05 else 60)
    try:
        async for _ in call:
            if way > 0.8:
                call.cancel()
    except (grpc.aio.AioRpcError, asyncio.CancelledError):
        return  # as it was asked for


async def many(service: Service, num: int, seed: int) -> None:
    rng, left = random.Random(seed), num
    async with grpc.aio.insecure_channel(service.address) as channel:
        stub: inference_pb2_grpc.InferenceServiceAsyncStub = inference_pb2_grpc.InferenceServiceStub(channel)

        async def work() -> None:
            nonlocal left
            while left > 0:
                left -= 1
                await one(stub, rng)

        await asyncio.gather(*(work() for _ in range(AT_ONCE)))


def growth(service: Service, num: int) -> dict[str, float]:
    """Growth in MiB per 10,000 requests after the warm-up, of each process."""
    asyncio.run(many(service, int(num * WARM_UP), 1))
    wait_until(lambda: nothing_is_left(service), 30, "something is held after the warm-up")
    before, had = memory(service), {name: things(child) for name, child in service.children().items()}
    rest = num - int(num * WARM_UP)
    asyncio.run(many(service, rest, 2))
    wait_until(lambda: nothing_is_left(service), 30, "something is held at the end")
    after = memory(service)
    for name, child in service.children().items():
        threads, files = things(child)
        assert threads <= had[name][0] + 1 and files <= had[name][1] + 4, name
    return {name: (after[name] - before[name]) / rest * 10_000 for name in before}


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_nothing_grows_over_a_hundred_thousand_requests() -> None:
    with serve(*SMALL_POOL) as service:
        grown = growth(service, 100_000)
    assert all(mib <= MIB_PER_10K for mib in grown.values()), grown


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_a_gateway_that_leaks_is_found_out() -> None:
    """The check finds a planted leak."""
    with serve(*SMALL_POOL, environment=faults(leak=512)) as service:
        grown = growth(service, 20_000)
    assert grown["gateway-0"] > MIB_PER_10K, grown
