"""One Converse call with many generations: its reader, its writer, and what waits for the streams of its generations.

The call ends when its last generation has. Its reader never waits for a stream: deltas that wait are merged, and a
stream that takes nothing for too long is ended.
"""

import asyncio
import itertools
from collections.abc import Callable, Sequence
from typing import TypeAlias

import grpc
from google.rpc import status_pb2
from sluice.errors import DETAILS_KEY
from sluice.v1 import inference_pb2, types_pb2

MERGED_FROM = 4  # waiting events of a stream; further deltas are merged
MOST_BYTES = 1 << 20  # of the waiting events of a stream
Event = inference_pb2.ConverseResponse  # has the parts of StreamGenerateResponse under the same names
_CODES = {code.value[0]: code for code in grpc.StatusCode}
_Call: TypeAlias = "grpc.aio.StreamStreamCall[inference_pb2.ConverseRequest, inference_pb2.ConverseResponse]"


class SharedCall:
    """A call and its generations by tag."""

    def __init__(self, call: _Call) -> None:
        self.takes_more = True
        self._call = call
        self._tags = itertools.count(1)
        self._generations: dict[int, SharedGeneration] = {}
        self._woken: dict[SharedGeneration, None] = {}  # for which a part of this message is
        self._frames: asyncio.Queue[inference_pb2.ConverseRequest | None] = asyncio.Queue()
        self._tasks = (asyncio.create_task(self._read()), asyncio.create_task(self._write()))

    @property
    def num_open(self) -> int:
        """The number of running generations."""
        return len(self._generations)

    def open(self, spec: types_pb2.GenerationSpec) -> "SharedGeneration":
        """Begins a generation."""
        tag = next(self._tags)
        generation = self._generations[tag] = SharedGeneration(self, tag, spec.output)
        opened = inference_pb2.Open(spec=spec, joined_frames=True)
        self._frames.put_nowait(inference_pb2.ConverseRequest(tag=tag, open=opened))
        return generation

    def cancel(self, tag: int) -> None:
        """Cancels a generation; no effect on one that has ended."""
        if self._generations.pop(tag, None) is not None:
            self._frames.put_nowait(inference_pb2.ConverseRequest(tag=tag, cancel=inference_pb2.Cancel()))
            self._end_if_idle()

    def _end_if_idle(self) -> None:
        if not self._generations:
            self.takes_more = False
            self._frames.put_nowait(None)

    async def _write(self) -> None:
        """Writes frames until None. The read side gets the status of a failed call."""
        try:
            while (frame := await self._frames.get()) is not None:
                await self._call.write(frame)
            await self._call.done_writing()
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
            return
        except asyncio.CancelledError:
            if not self._call.cancelled():
                raise

    async def _read(self) -> None:
        lost: tuple[grpc.StatusCode, grpc.aio.Metadata, str | None]
        lost = grpc.StatusCode.UNAVAILABLE, grpc.aio.Metadata(), "the server ended the call"
        try:
            while isinstance(message := await self._call.read(), Event):  # or EOF
                self._deliver(message)
                for frame in message.more[:]:  # a list: protobuf's container is read by way of an exception at its end
                    self._deliver(frame)
                self._tell()
        except grpc.aio.AioRpcError as error:
            lost = error.code(), error.trailing_metadata(), error.details()
        except asyncio.CancelledError:
            if not self._call.cancelled():
                raise
        finally:
            self.takes_more = False
            self._frames.put_nowait(None)
            for generation in self._generations.values():
                generation.fail(_error(*lost))
            self._generations.clear()
            self._tell()

    def wake(self, generation: "SharedGeneration") -> None:
        """Tells the stream of a generation that there is something for it, behind the last part of this message."""
        self._woken[generation] = None

    def _tell(self) -> None:
        woken, self._woken = self._woken, {}
        for generation in woken:
            generation.on_news()

    def _deliver(self, frame: inference_pb2.ConverseResponse) -> None:
        generation = self._generations.get(frame.tag)
        if generation is None:
            self.takes_more = self.takes_more and frame.WhichOneof("frame") != "going_away"
        elif generation.take(frame):
            del self._generations[frame.tag]
            self._end_if_idle()


class SharedGeneration:
    """One generation, read and cancelled like a call of its own: it is accepted when the engine has seen its prompt."""

    def __init__(self, call: SharedCall, tag: int, output: types_pb2.OutputOptions) -> None:
        self.on_news: Callable[[], None] = no_news  # called when `received` has something to return or to raise
        self._call = call
        self._tag = tag
        self._tells_prompt = output.echo or output.HasField("prompt_logprobs")
        self._accepted: Event | None = None  # until the next frame
        self._waiting: list[Event] = []
        self._num_bytes = 0  # of the waiting events, without the first
        self._end: grpc.aio.AioRpcError | bool = False  # its error; True: it has ended well

    def received(self) -> Sequence[Event] | None:
        """Returns the events that have come, None while there are none, an empty list behind the last. Raises
        AioRpcError."""
        found = self._waiting
        if found:
            self._waiting, self._num_bytes = [], 0
            return found
        if isinstance(self._end, grpc.aio.AioRpcError):
            raise self._end
        return found if self._end else None

    def cancel(self) -> None:
        """Cancels it; no effect if it has ended."""
        self._call.cancel(self._tag)

    def fail(self, error: grpc.aio.AioRpcError) -> None:
        """Ends it with `error`, behind the events that wait."""
        self._end = self._end or error
        self._call.wake(self)

    def take(self, frame: inference_pb2.ConverseResponse) -> bool:
        """Takes a frame. Returns whether it is the last."""
        delta = frame.delta
        if delta.seq:  # 0: it is no delta, which few frames are
            self._add_delta(frame, delta)
        elif self._take_other(frame):
            return True
        if self._num_bytes > MOST_BYTES:
            self.fail(_error(grpc.StatusCode.ABORTED, grpc.aio.Metadata(), "the client reads too slowly"))
            self.cancel()
        return False

    def _take_other(self, frame: Event) -> bool:
        match frame.WhichOneof("frame"):
            case "accepted":
                self._accepted = frame
            case "prompt_info":
                self._add(frame if self._tells_prompt else None)
            case "output_finished":
                self._add(frame)
            case "finished":
                self._end = True
                self._add(frame)
                return True
            case "failed":
                self.fail(_failed(frame.failed))
                return True
        return False

    def _add_delta(self, frame: Event, delta: types_pb2.Delta) -> None:
        waiting = self._waiting
        if not waiting and self._accepted is None:  # nearly always
            waiting.append(frame)
            self._call.wake(self)
        elif len(waiting) >= MERGED_FROM and waiting[-1].delta.seq and is_of_one(waiting[-1].delta, delta):
            self._num_bytes += delta.ByteSize()
            merge(waiting[-1].delta, delta)
        else:
            self._add(frame)

    def _add(self, event: Event | None) -> None:
        if self._waiting and event is not None:
            self._num_bytes += event.ByteSize()
        if self._accepted is not None:
            self._waiting.append(self._accepted)
            self._accepted = None
        if event is not None:
            self._waiting.append(event)
        self._call.wake(self)


def no_news() -> None:
    """Does nothing, where news of a call are not waited for."""


def is_of_one(first: types_pb2.Delta, second: types_pb2.Delta) -> bool:
    """Whether two deltas are of one output."""
    return first.output_index == second.output_index


def merge(into: types_pb2.Delta, delta: types_pb2.Delta) -> None:
    """Merges the delta that follows `into`, of the same output, as a gateway does for a slow reader."""
    text, reasoning = into.text + delta.text, into.reasoning + delta.reasoning
    consumed, steps = into.consumed + delta.consumed, into.coalesced_steps + delta.coalesced_steps
    drafted, accepted = into.drafted_tokens + delta.drafted_tokens, into.accepted_tokens + delta.accepted_tokens
    into.MergeFrom(delta)  # appends what is repeated, and takes the later number
    into.text, into.reasoning, into.consumed, into.coalesced_steps = text, reasoning, consumed, steps
    into.drafted_tokens, into.accepted_tokens = drafted, accepted


def _failed(failed: inference_pb2.Failed) -> grpc.aio.AioRpcError:
    """Returns the error that a call of its own would have ended with."""
    status = status_pb2.Status(code=failed.code, message=failed.message, details=failed.details)
    trailers = grpc.aio.Metadata((DETAILS_KEY, status.SerializeToString()))
    return _error(_CODES.get(failed.code, grpc.StatusCode.UNKNOWN), trailers, failed.message)


def _error(code: grpc.StatusCode, trailers: grpc.aio.Metadata, details: str | None) -> grpc.aio.AioRpcError:
    return grpc.aio.AioRpcError(code, grpc.aio.Metadata(), trailers, details)
