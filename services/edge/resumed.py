"""One generation's events as the edge reads them: resumed when the connection to its gateway is lost."""

import asyncio
from collections.abc import Callable, Sequence

import grpc
from sluice.progress import Progress
from sluice.v1 import inference_pb2, inference_pb2_grpc, types_pb2

from sluice_server.services.edge.errors import EdgeError, from_rpc
from sluice_server.services.edge.names import UNNAMED, FieldNames
from sluice_server.services.edge.recovery import CallRecovery
from sluice_server.services.edge.requests import Metadata
from sluice_server.services.edge.shared import Event, OwnCall, SharedCalls, StreamCall
from sluice_server.services.edge.shared_call import no_news


class EdgeStream:
    """The events of one generation, each once. Its owner calls `cancel` on every path."""

    def __init__(
        self,
        channel: grpc.aio.Channel,
        spec: types_pb2.GenerationSpec,
        metadata: Metadata,
        calls: SharedCalls,
        names: FieldNames = UNNAMED,
    ) -> None:
        """`names`: of the request's fields, for errors."""
        self._calls = calls
        self._inference: inference_pb2_grpc.InferenceServiceAsyncStub = inference_pb2_grpc.InferenceServiceStub(channel)
        self._recovery = CallRecovery(channel)
        self._progress = Progress(spec)
        self._metadata = metadata
        self._names = names
        self._sent: set[tuple[str | None, int]] = set()
        self._is_cancelled = False
        self._recovering: asyncio.Task[None] | None = None
        self._error: Exception | None = None  # why the call is not made again
        self._on_news: Callable[[], None] = no_news
        calls.began(metadata)
        self._call = self._asked()

    def attach(self, on_news: Callable[[], None]) -> None:
        """Sets what is called when `received` has something to return or to raise."""
        self._on_news = self._call.on_news = on_news

    async def read(self) -> Sequence[Event]:
        """Waits for events and returns those that have come; none behind the last. Raises EdgeError."""
        news = asyncio.Event()
        self.attach(news.set)
        while (events := self.received()) is None:
            await news.wait()
            news.clear()
        return events

    def received(self) -> Sequence[Event] | None:
        """Returns the events that have come, None while there are none, an empty list behind the last. Raises
        EdgeError."""
        if self._error is not None:
            raise self._error
        if self._recovering is not None:
            return None
        try:
            while (events := self._call.received()) is not None:
                if not events and self._progress.finished is None:
                    raise EdgeError(500, "server_error", "the server ended the stream before its last event")
                take = self._progress.take
                found = [event for event in events if take(event) is not None or self._is_told_first(event)]
                if found or not events:
                    return found
        except grpc.aio.AioRpcError as error:
            if self._progress.finished is not None:
                return ()
            if not self._progress.can_go_on:
                raise from_rpc(error, self._names) from error
            self._recovering = asyncio.create_task(self._recover(error))
        return None

    def cancel(self) -> None:
        """Cancel the generation; no effect on one that has ended."""
        if not self._is_cancelled:
            self._calls.ended(self._metadata)
        self._is_cancelled = True
        self.attach(no_news)
        self._call.cancel()
        if self._recovering is not None:
            self._recovering.cancel()

    async def _recover(self, error: grpc.aio.AioRpcError) -> None:
        """Makes a call for the rest once the gateway, or another one, can be reached."""
        try:
            await self._recovery.after(error)
            self._call = self._asked()
        except grpc.aio.AioRpcError as last:
            self._error = from_rpc(last, self._names)
        except Exception as bug:  # its reader raises it
            self._error = bug
        self._recovering = None
        self._on_news()

    def _asked(self) -> StreamCall:
        call = self._begun()
        call.on_news = self._on_news
        return call

    def _begun(self) -> StreamCall:
        if not self._progress.has_begun:
            return self._calls.begin(self._progress.spec, self._metadata)
        rest = inference_pb2.ResumeGenerateRequest(spec=self._progress.rest())
        return OwnCall(self._inference.ResumeGenerate(rest, metadata=self._metadata))

    def _is_told_first(self, event: Event) -> bool:
        """Whether an event that is no new delta was not read before: a stream that was resumed begins with what is
        known."""
        kind = kind_of(event)
        one = (kind, event.output_finished.output_index)
        if kind == "delta" or one in self._sent:
            return False
        self._sent.add(one)
        return True


def kind_of(event: Event) -> str | None:
    """Returns the name of the part that an event has."""
    if isinstance(event, inference_pb2.ConverseResponse):
        return event.WhichOneof("frame")
    return event.WhichOneof("event")
