"""The handler of Converse: one task reads frames, one writes them; the state between them is a Conversation.

The task of the call writes. Both hold back for each other: frames are not read while too many answers wait. Ends like
every call: nothing waits in the clean-up, and cancellation is raised on.
"""

import asyncio
import dataclasses
from collections.abc import Mapping

import grpc
from sluice.v1 import inference_pb2

from engine.errors import ServiceError, cancelled, deadline_exceeded
from services.faults import fault
from services.gateway.access.metadata import CallMetadata, Context, read_call, read_trace
from services.gateway.access.rate import Rate
from services.gateway.calls.conversation import Conversation
from services.gateway.calls.refusal import bare, refuse, turn_away
from services.gateway.contract.errors import malformed, slow_consumer
from services.gateway.requests.desk import RequestManager
from services.gateway.requests.parking import DetachedSessions
from services.messages.messages import Role
from services.telemetry.logs import about_stream, about_trace

HALF_CLOSE_S = 1.0  # what a client gets to half-close after the server has said that it goes away


class Converse:
    """`converse` is the handler."""

    def __init__(self, desk: RequestManager, parking: DetachedSessions) -> None:
        self._desk = desk
        self._parking = parking

    async def converse(self, requests: object, context: Context) -> None:
        """Converse: many generations on one stream."""
        failure: ServiceError | None = cancelled()  # unless something else is found out
        talk: _Talk | None = None
        try:
            talk = _Talk(self._desk, self._parking, context, read_call("Converse", context))
            await talk.run()
            failure = None
            return
        except ServiceError as error:
            failure = bare(error)
        except asyncio.CancelledError:
            failure = deadline_exceeded() if context.time_remaining() == 0 else cancelled()
            raise
        except grpc.aio.InternalError:
            raise  # the connection is gone
        except Exception as error:
            told = about_trace(read_trace(context)) if talk is None else talk.about
            failure = fault(Role.GATEWAY, told, "failed on this stream", error)
        finally:
            if talk is not None:
                talk.close(failure)
        if talk is None:
            await turn_away(self._desk.observer, "Converse", context, failure)
        await refuse(context, failure)


class _Talk:
    """One call of Converse while it runs."""

    def __init__(self, desk: RequestManager, parking: DetachedSessions, context: Context, call: CallMetadata) -> None:
        self._context = context
        self._call = call
        self._rate = Rate(desk.settings.max_stream_frames_per_s, desk.clock)
        self._news = asyncio.Event()
        self._room = asyncio.Event()
        self._fault: ServiceError | None = None  # of the stream itself
        self._is_stuck = False

        def call_now() -> CallMetadata:
            return dataclasses.replace(call, time_left_s=context.time_remaining())

        self._conversation = Conversation(desk, parking, call_now, self._news.set)
        self._reading: asyncio.Task[None] | None = None

    async def run(self) -> None:
        """Until nothing runs and nothing can come. Raises ServiceError for a fault of the stream."""
        writing = asyncio.current_task()
        assert writing is not None
        self._conversation.interrupt = lambda error: self._break_off(writing)
        self._reading = asyncio.create_task(self._read(), name="converse reading")
        try:
            await self._write()
        except asyncio.CancelledError:
            if self._is_stuck and writing.uncancel() == 0:
                raise slow_consumer() from None
            raise
        await asyncio.wait([self._reading], timeout=HALF_CLOSE_S)

    @property
    def about(self) -> Mapping[str, Mapping[str, object]]:
        """What a log line about the stream is about: its trace, and the generations that run on it."""
        return about_stream(self._call.traceparent, self._conversation.envelopes())

    def close(self, error: ServiceError | None) -> None:
        """Release everything; waits for nothing."""
        self._conversation.close(error)
        if self._reading is not None:
            self._reading.cancel()

    async def _write(self) -> None:
        conversation = self._conversation
        while True:
            frame = conversation.next()
            if frame is not None:
                conversation.reader.begin_write()
                await self._context.write(frame)
                conversation.reader.end_write()
                if conversation.has_room:
                    self._room.set()
            elif self._fault is not None:
                raise self._fault
            elif conversation.is_over:
                return
            else:
                self._news.clear()
                await self._news.wait()

    async def _read(self) -> None:
        """Take frames until the client half-closes."""
        try:
            while True:
                await asyncio.sleep(self._rate.wait_s())
                frame = await self._context.read()
                if frame is grpc.aio.EOF:
                    self._conversation.half_close()
                    return
                if not isinstance(frame, inference_pb2.ConverseRequest):
                    raise malformed("ConverseRequest")
                self._conversation.take(frame)
                while not self._conversation.has_room:
                    self._room.clear()
                    await self._room.wait()
        except ServiceError as error:
            self._fault = bare(error)
        except grpc.aio.BaseError:
            return  # the connection is gone, and grpc cancels the call
        except Exception as error:
            self._fault = fault(Role.GATEWAY, self.about, "failed while reading this stream", error)
        self._news.set()

    def _break_off(self, writing: "asyncio.Task[object]") -> None:
        """A write does not end, and there is news."""
        if not self._is_stuck:
            self._is_stuck = True
            writing.cancel()
