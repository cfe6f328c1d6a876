"""Shares Converse calls among the streams of one caller: deltas of many streams come as one message.

A message of a call of its own costs the edge and its gateway several times what a delta costs, so the streams of one
caller become generations of one call, and frames that are ready together are joined. Each is read and cancelled like a
call of its own, which a stream has that is part of a client's trace or goes on at another gateway. The metadata of the
call are checked when it begins: it takes new generations for a few seconds only.
"""

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import TypeAlias

import grpc
from sluice.v1 import inference_pb2, inference_pb2_grpc, types_pb2

from sluice_server.services.edge.requests import Metadata
from sluice_server.services.edge.shared_call import SharedCall, SharedGeneration

TAKES_S = 5.0  # how long a call takes new generations
MOST_UNREAD = 8  # events of a call of one stream; then it is its gateway's to see that nobody reads
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
        self.on_news: Callable[[], None] = lambda: None  # called when `received` has something to return or to raise
        self._call = call
        self._waiting: list[Event] = []
        self._room = asyncio.Event()
        self._end: grpc.aio.AioRpcError | bool = False  # its error; True: it has ended well
        self._reading = asyncio.create_task(self._read())

    def received(self) -> Sequence[Event] | None:
        """Returns the events that have come, None while there are none, an empty list behind the last. Raises
        AioRpcError."""
        found = self._waiting
        if found:
            self._waiting = []
            self._room.set()
            return found
        if isinstance(self._end, grpc.aio.AioRpcError):
            raise self._end
        return found if self._end else None

    def cancel(self) -> None:
        """Cancels it; no effect if it has ended."""
        self._call.cancel()
        self._room.set()

    async def _read(self) -> None:
        """Reads events, as many ahead as a stream may leave unread."""
        nothing, text = grpc.aio.Metadata(), "the call was cancelled"
        end: grpc.aio.AioRpcError | bool = grpc.aio.AioRpcError(grpc.StatusCode.CANCELLED, nothing, nothing, text)
        try:
            while isinstance(event := await self._call.read(), Event):  # or EOF
                self._waiting.append(event)
                self.on_news()
                while len(self._waiting) >= MOST_UNREAD and not self._call.done():
                    self._room.clear()
                    await self._room.wait()
            end = True
        except grpc.aio.AioRpcError as error:
            end = error
        except asyncio.CancelledError:
            if not self._call.cancelled():
                raise
        finally:
            self._end = end
            self.on_news()


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
        if any(key in OWN for key, _ in metadata):
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
