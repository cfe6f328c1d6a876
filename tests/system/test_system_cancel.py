"""Cancels at random moments, hundreds of them: one terminal each, and nothing left in any stage."""

import asyncio
import random
import urllib.request

import grpc
import pytest
from sluice.v1 import inference_pb2, inference_pb2_grpc

from tests.system.roles import free_ports
from tests.system.service import Service, generate, serve, spec, wait_until

AT_ONCE = 24


def metric(port: int, name: str, label: str = "") -> float:
    """Sum of a metric's samples at a process's endpoint, of those with `label` if given."""
    text = urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=60).read().decode()
    lines = [line for line in text.splitlines() if line.startswith((f"{name}{{", f"{name} "))]
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if label in line)


async def one(stub: "inference_pb2_grpc.InferenceServiceAsyncStub", rng: random.Random) -> grpc.StatusCode:
    """A stream that ends in one of four ways: cancelled by its client after some messages, cancelled by id, past its
    deadline, or left alone."""
    way = rng.choice(["client", "by id", "deadline", "alone"])
    prompt = [rng.randrange(4000) for _ in range(rng.choice((1, 30, 200)))]
    request = inference_pb2.StreamGenerateRequest(spec=spec(prompt, 4 if way == "alone" else 400))
    call = stub.StreamGenerate(request, timeout=rng.random() * 0.1 if way == "deadline" else 60)
    left = rng.randrange(4)
    try:
        async for event in call:
            left -= 1
            if left <= 0 and way == "client":
                call.cancel()
            if way == "by id" and event.HasField("accepted"):
                wanted = inference_pb2.CancelGenerationRequest(generation_id=event.accepted.generation_id)
                await stub.CancelGeneration(wanted)
        return grpc.StatusCode.OK
    except grpc.aio.AioRpcError as error:
        return error.code()
    except asyncio.CancelledError:
        return grpc.StatusCode.CANCELLED


async def storm(service: Service, num: int) -> dict[grpc.StatusCode, int]:
    """`num` streams, AT_ONCE at a time; how many ended in which status."""
    rng, ends, left = random.Random(7), dict[grpc.StatusCode, int](), num
    async with grpc.aio.insecure_channel(service.address) as channel:
        stub: inference_pb2_grpc.InferenceServiceAsyncStub = inference_pb2_grpc.InferenceServiceStub(channel)

        async def work() -> None:
            nonlocal left
            while left > 0:
                left -= 1
                code = await one(stub, rng)
                ends[code] = ends.get(code, 0) + 1

        await asyncio.gather(*(work() for _ in range(AT_ONCE)))
    return ends


@pytest.mark.timeout(240)
@pytest.mark.parametrize("num", [300, pytest.param(1000, marks=pytest.mark.long)])
def test_cancels_leave_nothing(num: int) -> None:
    first = free_ports(4)[0]
    with serve("--metrics-port", str(first), "--max-num-seqs", "16") as service:
        ports = {child: first + i for i, child in enumerate(("engine", "gateway", "tokenizer", "detokenizer"))}
        with service.stub() as stub:
            before = [token.id for token in generate(stub, spec("import os", 12)).tokens]
        ends = asyncio.run(storm(service, num))
        assert sum(ends.values()) == num
        allowed = {grpc.StatusCode.OK, grpc.StatusCode.CANCELLED, grpc.StatusCode.DEADLINE_EXCEEDED}
        assert set(ends) == allowed

        def is_idle() -> bool:
            held = metric(ports["engine"], "sluice_cache_blocks", 'state="used"')
            open_anywhere = [metric(ports[role], "sluice_requests_open") for role in ports]
            return not held and not any(open_anywhere)

        wait_until(is_idle, 60, "something is still held after the storm")
        # One terminal each; a deadline of a millisecond can pass before the request reaches the gateway.
        late = ends[grpc.StatusCode.DEADLINE_EXCEEDED]
        assert num + 1 - late <= metric(ports["gateway"], "sluice_requests_total") <= num + 1
        # A client may cancel, or its deadline pass, while the end of its answer is on the way to it.
        well, other = metric(ports["gateway"], "sluice_requests_total", 'code="OK"'), num - ends[grpc.StatusCode.OK]
        assert ends[grpc.StatusCode.OK] + 1 <= well <= ends[grpc.StatusCode.OK] + 1 + other // 2
        with service.stub() as stub:
            assert [token.id for token in generate(stub, spec("import os", 12)).tokens] == before
