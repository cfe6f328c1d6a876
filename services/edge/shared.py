"""Shares Converse calls among the streams of one caller: deltas of many streams come as one message.

A message of a call of its own costs the edge and its gateway several times what a delta costs, so while a stream of one
caller runs, further ones become generations of one call, and frames that are ready together are joined. Each is read
and cancelled like a call of its own. The metadata of the call are checked when it begins: it takes new generations for
a few seconds only.
"""

import time
from collections.abc import Callable, Sequence
from typing import TypeAlias

import grpc
from sluice.v1 import inference_pb2, inference_pb2_grpc, types_pb2

from sluice_server.services.edge.requests import Metadata
from sluice_server.services.edge.shared_call import SharedCall, SharedGeneration

SHARED_FROM = 1  # streams of one caller that have calls of their own; further ones share
TAKES_S = 5.0  # how long a call takes new generations
MOST_GENERATIONS = 128  # of one call; a gateway allows twice as many
OWN = frozenset({"traceparent", "tracestate"})  # of one request: with these it has a call of its own

Event: TypeAlias = (
    inference_pb2.StreamGenerateResponse | inference_pb2.ResumeGenerateResponse | inference_pb2.ConverseResponse
)
_Call: TypeAlias = (
    "grpc.aio.UnaryStreamCall[inference_pb2.StreamGenerateRequest, inference_pb2.StreamGenerateResponse]"
    " | grpc.aio.UnaryStreamCall[inference_pb2.ResumeGenerateRequest, inference_pb2.ResumeGenerateResponse]"
)


class OwnCall:
    """A call of one stream."""

    def __init__(self, call: _Call) -> None:
        self._call = call

    async def read(self) -> Sequence[Event]:
        """Returns the next event; none behind the last. Raises AioRpcError."""
        event = await self._call.read()
        return (event,) if isinstance(event, Event) else ()  # or EOF

    def cancel(self) -> None:
        """Cancels it; no effect if it has ended."""
        self._call.cancel()


StreamCall: TypeAlias = OwnCall | SharedGeneration


class SharedCalls:
    """The calls in front of one channel."""

    def __init__(self, channel: grpc.aio.Channel, clock: Callable[[], float] = time.monotonic) -> None:
        self._inference: inference_pb2_grpc.InferenceServiceAsyncStub = inference_pb2_grpc.InferenceServiceStub(channel)
        self._clock = clock
        self._num_running: dict[Metadata, int] = {}  # streams by caller
        self._newest: dict[Metadata, tuple[SharedCall, float]] = {}  # and until when it takes generations

    def began(self, metadata: Metadata) -> None:
        """Counts a stream of a caller; `ended` is called once for it."""
        self._num_running[metadata] = self._num_running.get(metadata, 0) + 1

    def ended(self, metadata: Metadata) -> None:
        """Counts the end of a stream."""
        left = self._num_running[metadata] - 1
        if left:
            self._num_running[metadata] = left
        else:
            del self._num_running[metadata]
            self._newest.pop(metadata, None)

    def begin(self, spec: types_pb2.GenerationSpec, metadata: Metadata) -> StreamCall:
        """Begins a generation."""
        if self._num_running.get(metadata, 0) <= SHARED_FROM or any(key in OWN for key, _ in metadata):
            asked = inference_pb2.StreamGenerateRequest(spec=spec)
            return OwnCall(self._inference.StreamGenerate(asked, metadata=metadata))
        return self._shared(metadata).open(spec)

    def _shared(self, metadata: Metadata) -> SharedCall:
        """Returns the call that takes new generations of a caller."""
        now_s = self._clock()
        call, until_s = self._newest.get(metadata, (None, 0.0))
        if call is not None and now_s < until_s and call.takes_more and call.num_open < MOST_GENERATIONS:
            return call
        call = SharedCall(self._inference.Converse(metadata=metadata))
        self._newest[metadata] = call, now_s + TAKES_S
        return call
