"""The generation service: everything that can be asked of generations, for any transport.

A `CallMetadata` says who asks, a message of the contract what; what comes back is typed events. All raise
`ServiceError`. What
is returned open is closed by whoever has it.
"""

from collections.abc import Callable

from sluice.v1 import inference_pb2, types_pb2

from sluice_server.engine.errors import ServiceError
from sluice_server.services.gateway.access.call import CallMetadata
from sluice_server.services.gateway.contract import translate
from sluice_server.services.gateway.contract.errors import not_found
from sluice_server.services.gateway.contract.translate import TranslatedRequest
from sluice_server.services.gateway.generation.converse import ConverseSession
from sluice_server.services.gateway.generation.detached import DetachedSessions
from sluice_server.services.gateway.generation.event_sequence import EventOptions
from sluice_server.services.gateway.generation.stream import GenerationStream, RequestReader
from sluice_server.services.gateway.requests.manager import RequestManager
from sluice_server.services.gateway.requests.open_request import RequestStatus
from sluice_server.services.telemetry.observed import RefusedRequest

MAX_ID_LENGTH = 128


class GenerationService:
    """Of one gateway."""

    def __init__(self, manager: RequestManager, detached: DetachedSessions) -> None:
        self._manager = manager
        self._detached = detached

    def generate(self, call: CallMetadata, spec: types_pb2.GenerationSpec) -> GenerationStream:
        """Begin a generation; its events."""
        asked = translate.generation(spec, call.priority, self._manager.settings)
        request = self._manager.open(call, asked, streams=True)
        options = EventOptions(is_eager=False, tells_prompt=asked.tells_prompt)
        stream = GenerationStream(request, self._detached, options)
        self._manager.submit(request)
        return stream

    def generate_whole(self, call: CallMetadata, spec: types_pb2.GenerationSpec) -> RequestReader:
        """Begin a generation that is told at once, at its end."""
        return self._read(call, translate.whole(spec, call.priority, self._manager.settings))

    def resume(self, call: CallMetadata, spec: types_pb2.GenerationSpec, request_id: str) -> GenerationStream:
        """What a reader lacks of a generation that outlived its last one, and what comes. When nobody knows it any more
        it is gone on with, where `spec` says from what."""
        point = spec.resume
        translate.check_resume(spec)
        try:
            request = self._detached.take(request_id, call.caller.tenant)
        except ServiceError:
            if not can_go_on(spec):
                raise
            asked = translate.continuation(spec, call.priority, self._manager.settings)
            request, is_new = self._manager.open(call, asked, streams=True), True
        else:
            self._manager.lift_credit(request)
            is_new = False
        tells_prompt = request.asked.tells_prompt and not point.after_seq
        options = EventOptions(is_eager=False, tells_prompt=tells_prompt, after_seq=point.after_seq)
        stream = GenerationStream(request, self._detached, options)
        if is_new:
            self._manager.submit(request)
        else:
            request.trace.happened("reattached")
        return stream

    def converse(self, call: Callable[[], CallMetadata]) -> ConverseSession:
        """Many generations on one stream; `call` gives it with the time that is left now."""
        return ConverseSession(self._manager, self._detached, call, self.refused)

    def cancel(
        self, tenant: str, request_id: str, output_index: int | None = None
    ) -> tuple[RequestStatus, RequestStatus]:
        """State in which the generation, or one output of it, was found, and state now."""
        return self._manager.cancel(request_id, tenant, output_index)

    def tokenize(self, call: CallMetadata, asked: inference_pb2.TokenizeRequest) -> RequestReader:
        """Encode a text; through the ring, as everything."""
        return self._read(call, translate.tokenization(asked, self._manager.settings))

    def detokenize(self, call: CallMetadata, asked: inference_pb2.DetokenizeRequest) -> RequestReader:
        """Decode ids; through the ring, as everything."""
        return self._read(call, translate.detokenization(asked, self._manager.settings))

    def refused(self, call: CallMetadata, error: ServiceError) -> str:
        """A call was not let in, here or before it came here: who watches is told; the W3C header of its trace."""
        refused = RefusedRequest(call.method, error, call.caller.tenant, call.traceparent, call.tracestate)
        return self._manager.observer.refused(refused)

    def _read(self, call: CallMetadata, asked: TranslatedRequest) -> RequestReader:
        request = self._manager.open(call, asked, streams=False)
        reader = RequestReader(request, self._detached)
        self._manager.submit(request)
        return reader


def can_go_on(spec: types_pb2.GenerationSpec) -> bool:
    """Whether a reader says what it has, so that another process can go on with it."""
    return spec.WhichOneof("prompt") is not None


def check_id(generation_id: str) -> None:
    """Raise `ServiceError` for what cannot name a generation."""
    if not 1 <= len(generation_id) <= MAX_ID_LENGTH:
        raise not_found("generation", generation_id, "send the id that Accepted named")
