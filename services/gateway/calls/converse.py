"""The handler of Converse: one task reads frames, another writes events; the `ConverseSession` is between them.

The task of the call is the writer. Frames are not read while too many replies wait to be written. Like every call, its
clean-up never waits, and cancellation is raised again.
"""

import asyncio
import dataclasses
from collections.abc import Callable, Mapping

import grpc
from sluice.v1 import inference_pb2

from sluice_server.engine.errors import ServiceError, cancelled, deadline_exceeded
from sluice_server.services.faults import fault
from sluice_server.services.gateway.access.call import CallMetadata
from sluice_server.services.gateway.access.metadata import Context, read_call, read_trace
from sluice_server.services.gateway.access.rate import Rate
from sluice_server.services.gateway.calls import joined_frames
from sluice_server.services.gateway.calls.refusal import refuse, turn_away
from sluice_server.services.gateway.contract.errors import bare, malformed
from sluice_server.services.gateway.generation.converse import ConverseSession
from sluice_server.services.gateway.generation.service import GenerationService
from sluice_server.services.messages.processes import Role
from sluice_server.services.telemetry.logs import about_stream, about_trace
from sluice_server.services.telemetry.observed import Observer

HALF_CLOSE_S = 1.0  # time for the client to half-close after the going-away event


class Converse:
    """The handler `converse` and what it needs."""

    def __init__(self, service: GenerationService, observer: Observer, rate: Callable[[], Rate]) -> None:
        """`rate` returns the rate limit for the frames of one stream."""
        self._service = service
        self._observer = observer
        self._rate = rate

    async def converse(self, requests: object, context: Context) -> None:
        """Converse: runs many generations on one stream."""
        failure: ServiceError | None = cancelled()  # the default, replaced below
        talk: _ConverseCall | None = None
        try:
            talk = _ConverseCall(self._service, self._rate(), context, read_call("Converse", context))
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
            extra = about_trace(read_trace(context)) if talk is None else talk.about
            failure = fault(Role.GATEWAY, extra, "failed on this stream", error)
        finally:
            if talk is not None:
                talk.close(failure)
        if talk is None:
            await turn_away(self._observer, "Converse", context, failure)
        await refuse(context, failure)


class _ConverseCall:
    """One running call of Converse."""

    def __init__(self, service: GenerationService, rate: Rate, context: Context, call: CallMetadata) -> None:
        self._context = context
        self._call = call
        self._rate = rate
        self._session = service.converse(lambda: dataclasses.replace(call, time_left_s=context.time_remaining()))
        self._reading: asyncio.Task[None] | None = None

    async def run(self) -> None:
        """Writes events until no generation runs and none can be opened. Raises ServiceError for an error of the
        stream."""
        self._reading = asyncio.create_task(self._read(), name="converse reading")
        with self._session.interruptible():
            async for event in self._session:
                await self._context.write(joined_frames.joined(event, self._session.further()))
        await asyncio.wait([self._reading], timeout=HALF_CLOSE_S)

    @property
    def about(self) -> Mapping[str, Mapping[str, object]]:
        """The fields of log lines about the stream: its trace, and the generations that run on it."""
        return about_stream(self._call.traceparent, self._session.envelopes())

    def close(self, error: ServiceError | None) -> None:
        """Releases everything. Never waits."""
        self._session.close(error)
        if self._reading is not None:
            self._reading.cancel()

    async def _read(self) -> None:
        """Reads frames until the client half-closes."""
        try:
            while True:
                await asyncio.sleep(self._rate.wait_s())
                frame = await self._context.read()
                if frame is grpc.aio.EOF:
                    self._session.half_close()
                    return
                if not isinstance(frame, inference_pb2.ConverseRequest):
                    raise malformed("ConverseRequest")
                say(self._session, frame)
                await self._session.wait_for_room()
        except ServiceError as error:
            self._session.fail(bare(error))
        except grpc.aio.BaseError:
            return  # the connection is gone, and grpc cancels the call
        except Exception as error:
            self._session.fail(fault(Role.GATEWAY, self.about, "failed while reading this stream", error))


def say(session: ConverseSession, frame: inference_pb2.ConverseRequest) -> None:
    """Applies a frame to the session. Errors in the frame become events and are not raised."""
    tag, kind = frame.tag, frame.WhichOneof("frame")
    if kind == "ping" and not tag:
        session.ping(frame.ping.nonce)
        return
    if not tag:
        session.reject(tag)
        return
    match kind:
        case "open":
            session.open(tag, frame.open)
        case "append":
            session.append(tag, frame.append)
        case "update":
            session.update(tag, frame.update)
        case "grant":
            session.grant(tag, frame.grant.tokens)
        case "cancel":
            session.cancel(tag, frame.cancel.output_index if frame.cancel.HasField("output_index") else None)
        case "close_input":
            session.close_input(tag)
        case _:
            session.reject(tag)
