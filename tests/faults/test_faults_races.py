"""Forced races: named points of the code are slowed down, and a cancel, a deadline or a death happens there."""

import asyncio
import contextlib
import random
from collections.abc import Callable

import grpc
import pytest
from sluice.v1 import inference_pb2, inference_pb2_grpc

from benchmarks.streams import stream_all, varied
from tests.faults.faulty import faults
from tests.faults.test_faults_kill import is_serving, nothing_is_left
from tests.system.service import Service, generate, serve, spec, wait_until

# Where requests change hands: "module:function" of the process named.
POINTS = {
    "gateway opens": "sluice_server.services.gateway.requests.manager:RequestManager.open",
    "gateway submits": "sluice_server.services.gateway.requests.manager:RequestManager.submit",
    "gateway delivers": "sluice_server.services.gateway.requests.manager:RequestManager.handle",
    "gateway closes": "sluice_server.services.gateway.requests.manager:RequestManager.close",
    "gateway sends again": "sluice_server.services.gateway.requests.manager:RequestManager.resubmit",
    "tokenizer takes": "sluice_server.services.tokenizer.stage:TokenizerStage.handle",
    "tokenizer answers": "sluice_server.services.tokenizer.stage:TokenizerStage._answer",
    "tokenizer finishes": "sluice_server.services.tokenizer.stage:TokenizerStage._finish",
    "engine admits": "sluice_server.engine.scheduler.scheduler:Scheduler.add",
    "engine computes": "sluice_server.engine.worker.runner:Runner._compute",
    "engine frees": "sluice_server.engine.scheduler.outputs:Outputs.forget",
    "detokenizer takes": "sluice_server.services.detokenizer.stage:DetokenizerStage._take",
}
QUICK = ("engine frees",)
NUM = 12
LONG = [pytest.param(point, id=point, marks=() if point in QUICK else pytest.mark.long) for point in POINTS]


async def ask(service: Service, act: Callable[[grpc.aio.Call, int], None], timeout_s: float) -> list[str]:
    """How some concurrent streams ended; `act` may disturb each as soon as it was sent."""

    async def one(stub: "inference_pb2_grpc.InferenceServiceAsyncStub", at: int) -> str:
        request = inference_pb2.StreamGenerateRequest(spec=spec([60 + at, 61, 62], 6))
        call = stub.StreamGenerate(request, timeout=timeout_s)
        act(call, at)
        try:
            async for _ in call:
                pass
            return "OK"
        except grpc.aio.AioRpcError as error:
            return error.code().name
        except asyncio.CancelledError:
            return "CANCELLED"

    async with grpc.aio.insecure_channel(service.address) as channel:
        stub: inference_pb2_grpc.InferenceServiceAsyncStub = inference_pb2_grpc.InferenceServiceStub(channel)
        return list(await asyncio.gather(*(one(stub, at) for at in range(NUM))))


def cancels(rng: random.Random) -> Callable[[grpc.aio.Call, int], None]:
    """Cancels each within a quarter of a second."""

    def act(call: grpc.aio.Call, at: int) -> None:
        asyncio.get_running_loop().call_later(rng.random() * 0.25, call.cancel)

    return act


def leave(call: grpc.aio.Call, at: int) -> None:
    """Does nothing."""


@pytest.mark.parametrize("point", LONG)
def test_whatever_meets_a_request_there_it_ends_once_and_leaves_nothing(point: str) -> None:
    """F11."""
    rng = random.Random(point)
    victim = {"gateway": "tokenizer"}.get(point.split(maxsplit=1)[0], point.split(maxsplit=1)[0])
    with serve("--max-restarts", "100", environment=faults(slow=POINTS[point])) as service:
        ends = asyncio.run(ask(service, cancels(rng), 60))
        assert set(ends) <= {"CANCELLED", "OK"}
        wait_until(lambda: nothing_is_left(service), 30, "cancelled requests hold something")
        ends = asyncio.run(ask(service, leave, 0.2))
        assert set(ends) <= {"DEADLINE_EXCEEDED", "OK", "RESOURCE_EXHAUSTED"}
        wait_until(lambda: nothing_is_left(service), 30, "requests past their deadline hold something")
        killed: list[int] = []

        def die(deltas: int, ended: int) -> None:
            if not killed:
                killed.append(0)
                with contextlib.suppress(KeyError):
                    dying = service.children()[f"{victim}-0"]
                    killed[0] = dying.pid
                    dying.kill()

        def is_replaced() -> bool:
            """Whether another process has its name. The end of one that had sent all is noticed late."""
            child = service.children().get(f"{victim}-0")
            return child is not None and child.pid != killed[0]

        answers = stream_all(service.address, varied(4, 8), die)
        assert [answer.error for answer in answers] == [""] * 4
        wait_until(is_replaced, 60, "the process did not come back")
        wait_until(lambda: is_serving(service) and nothing_is_left(service), 60, "the service did not recover")
        with service.stub() as stub:
            assert generate(stub, spec("import os", 2)).completion_tokens == 2
