"""The health of the service behind the edge. Many requests share one RPC, and its answer for a moment."""

import asyncio
import time
from collections.abc import Callable

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from sluice.v1 import control_pb2, inference_pb2

TIMEOUT_S = 2.0
FRESH_S = 0.1  # how long an answer is repeated: thousands of requests a second then cost the gateway ten
SERVING = "SERVING"
ADMITS: str = inference_pb2.DESCRIPTOR.services_by_name["InferenceService"].full_name
LIVES: str = control_pb2.DESCRIPTOR.services_by_name["ControlService"].full_name


class ServiceHealth:
    """The states of two services of the contract: `ADMITS` says whether requests are admitted, `LIVES` whether the
    gateway answers and is not being drained."""

    def __init__(self, channel: grpc.aio.Channel, clock: Callable[[], float] = time.monotonic) -> None:
        self._stub = health_pb2_grpc.HealthStub(channel)
        self._clock = clock
        self._asking: dict[str, asyncio.Task[str]] = {}
        self._found: dict[str, tuple[float, str]] = {}

    async def status(self, service: str) -> str:
        """Returns SERVING, NOT_SERVING, or the gRPC status with which asking failed."""
        at_s, found = self._found.get(service, (float("-inf"), ""))
        if self._clock() - at_s < FRESH_S:
            return found
        task = self._asking.get(service)
        if task is None:
            task = self._asking[service] = asyncio.create_task(self._ask(service))
        return await asyncio.shield(task)  # a client that leaves does not end it for the others

    async def _ask(self, service: str) -> str:
        try:
            asked = health_pb2.HealthCheckRequest(service=service)
            answer = await self._stub.Check(asked, timeout=TIMEOUT_S)
            found = SERVING if answer.status == health_pb2.HealthCheckResponse.SERVING else "NOT_SERVING"
        except grpc.aio.AioRpcError as error:
            found = error.code().name
        finally:
            del self._asking[service]
        self._found[service] = (self._clock(), found)
        return found
