"""One generation's events as the edge reads them: resumed when the connection to its gateway is lost."""

from collections.abc import Sequence

import grpc
from sluice.progress import Progress
from sluice.v1 import inference_pb2, inference_pb2_grpc, types_pb2

from sluice_server.services.edge.errors import EdgeError, from_rpc
from sluice_server.services.edge.names import UNNAMED, FieldNames
from sluice_server.services.edge.recovery import CallRecovery
from sluice_server.services.edge.requests import Metadata
from sluice_server.services.edge.shared import Event, OwnCall, SharedCalls, StreamCall


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
        calls.began(metadata)
        self._call = self._asked()

    async def read(self) -> Sequence[Event]:
        """Returns the events that have come, at least one; none behind the last. Raises EdgeError."""
        try:
            return await self._next()
        except grpc.aio.AioRpcError as error:
            raise from_rpc(error, self._names) from error

    async def _next(self) -> Sequence[Event]:
        while True:
            try:
                events = await self._call.read()
            except grpc.aio.AioRpcError as error:
                if self._progress.finished is not None:
                    return ()
                if not self._progress.can_go_on:
                    raise
                await self._recovery.after(error)
                if self._is_cancelled:
                    raise
                self._call = self._asked()
                continue
            if not events and self._progress.finished is None:
                raise EdgeError(500, "server_error", "the server ended the stream before its last event")
            if (found := [event for event in events if self._is_new(event)]) or not events:
                return found

    def cancel(self) -> None:
        """Cancel the generation; no effect on one that has ended."""
        if not self._is_cancelled:
            self._calls.ended(self._metadata)
        self._is_cancelled = True
        self._call.cancel()

    def _asked(self) -> StreamCall:
        if not self._progress.has_begun:
            return self._calls.begin(self._progress.spec, self._metadata)
        rest = inference_pb2.ResumeGenerateRequest(spec=self._progress.rest())
        return OwnCall(self._inference.ResumeGenerate(rest, metadata=self._metadata))

    def _is_new(self, event: Event) -> bool:
        """Records an event. Whether it was not read before: a stream that was resumed begins with what is known."""
        if self._progress.take(event) is not None:
            return True
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
