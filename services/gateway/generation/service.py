"""The generation service: all operations on generations, for any transport.

Each call takes a `CallMetadata` (caller, trace, deadline) and a message of the contract, and returns typed events. All
calls raise `ServiceError`. The caller closes the readers and streams that it gets.
"""

from collections.abc import Callable

from sluice.v1 import inference_pb2, types_pb2

from sluice_server.engine.errors import ServiceError
from sluice_server.engine.models.labels import LabelsConfig
from sluice_server.services.gateway.access.call import CallMetadata
from sluice_server.services.gateway.contract import translate
from sluice_server.services.gateway.contract.classification import classification, ranking, scoring
from sluice_server.services.gateway.contract.embedding import embedding
from sluice_server.services.gateway.contract.errors import not_found
from sluice_server.services.gateway.contract.ids import Slices
from sluice_server.services.gateway.contract.translate import TranslatedRequest
from sluice_server.services.gateway.generation.choosing import chosen
from sluice_server.services.gateway.generation.converse import ConverseSession
from sluice_server.services.gateway.generation.event_sequence import EventOptions
from sluice_server.services.gateway.generation.stream import GenerationStream, RequestReader
from sluice_server.services.gateway.models.registry import Models, Served
from sluice_server.services.gateway.requests.open_request import RequestStatus
from sluice_server.services.telemetry.observed import Observer, RefusedRequest

MAX_ID_LENGTH = 128


class GenerationService:
    """The generation service of one gateway."""

    def __init__(self, models: Models[Served], observer: Observer) -> None:
        self._models = models
        self._observer = observer

    def generate(self, call: CallMetadata, spec: types_pb2.GenerationSpec) -> GenerationStream:
        """Begins a generation; returns the stream of its events."""
        one = chosen(self._models, call, spec)
        asked = translate.generation(spec, call.priority, one.manager.settings)
        request = one.manager.open(call, asked, streams=True)
        options = EventOptions(is_eager=False, tells_prompt=asked.tells_prompt)
        stream = GenerationStream(request, one.detached, options)
        one.manager.submit(request)
        return stream

    def generate_whole(self, call: CallMetadata, spec: types_pb2.GenerationSpec) -> RequestReader:
        """Begins a generation whose result is returned at once, at its end."""
        one = chosen(self._models, call, spec)
        return _read(one, call, translate.whole(spec, call.priority, one.manager.settings))

    def resume(self, call: CallMetadata, spec: types_pb2.GenerationSpec, request_id: str) -> GenerationStream:
        """Returns a stream of the deltas that a reader lacks and of those to come. A generation that this gateway no
        longer has is continued as a new request, if `spec` holds the prompt and what was received."""
        point = spec.resume
        translate.check_resume(spec)
        one = self._models.owner(request_id)
        try:
            request = one.detached.take(request_id, call.caller.tenant)
        except ServiceError:
            if not can_go_on(spec):
                raise
            one = chosen(self._models, call, spec)
            asked = translate.continuation(spec, call.priority, one.manager.settings)
            request, is_new = one.manager.open(call, asked, streams=True), True
        else:
            one.manager.changes.lift_credit(request, one.manager.settings.limits.max_credit)
            is_new = False
        tells_prompt = request.asked.tells_prompt and not point.after_seq
        options = EventOptions(is_eager=False, tells_prompt=tells_prompt, after_seq=point.after_seq)
        stream = GenerationStream(request, one.detached, options)
        if is_new:
            one.manager.submit(request)
        else:
            request.trace.happened("reattached")
        return stream

    def converse(self, call: Callable[[], CallMetadata]) -> ConverseSession:
        """Begins a stream of many generations; `call` returns its metadata with the time that is left now."""
        return ConverseSession(self._models, call, self.refused)

    def cancel(
        self, tenant: str, request_id: str, output_index: int | None = None
    ) -> tuple[RequestStatus, RequestStatus]:
        """Cancels a generation, or one output of it; returns the status found and the status now."""
        return self._models.owner(request_id).manager.cancel(request_id, tenant, output_index)

    def tokenize(self, call: CallMetadata, asked: inference_pb2.TokenizeRequest) -> RequestReader:
        """Encodes a text, through the ring like every request."""
        one = chosen(self._models, call, asked)
        return _read(one, call, translate.tokenization(asked, one.manager.settings))

    def detokenize(self, call: CallMetadata, asked: inference_pb2.DetokenizeRequest) -> Slices[RequestReader]:
        """Decodes ids, through the ring like every request. The request is translated in slices."""
        one = chosen(self._models, call, asked)
        translated = yield from translate.detokenization(asked, one.manager.settings)
        return _read(one, call, translated)

    def embed(self, call: CallMetadata, asked: inference_pb2.EmbedRequest) -> RequestReader:
        """Makes a vector of each input."""
        one = chosen(self._models, call, asked)
        return _read(one, call, embedding(asked, call.priority, one.manager.settings))

    def classify(self, call: CallMetadata, asked: inference_pb2.ClassifyRequest) -> RequestReader:
        """Tells the classes of each input."""
        one = chosen(self._models, call, asked)
        return _read(one, call, classification(asked, call.priority, one.manager.settings))

    def rerank(self, call: CallMetadata, asked: inference_pb2.RerankRequest) -> RequestReader:
        """Ranks documents."""
        one = chosen(self._models, call, asked)
        return _read(one, call, ranking(asked, call.priority, one.manager.settings))

    def score(self, call: CallMetadata, asked: inference_pb2.ScoreRequest) -> RequestReader:
        """Scores pairs of texts."""
        one = chosen(self._models, call, asked)
        return _read(one, call, scoring(asked, call.priority, one.manager.settings))

    def labels_of(self, reader: RequestReader) -> LabelsConfig | None:
        """Returns the classes of the head of the model that answers a request; None without one."""
        one = self._models.of(reader.request.envelope.model)
        return None if one is None else one.manager.settings.model.labels

    def refused(self, call: CallMetadata, error: ServiceError) -> str:
        """Reports a refused call to the observer; returns the W3C traceparent of its trace, or ""."""
        refused = RefusedRequest(call.method, error, call.caller.tenant, call.traceparent, call.tracestate)
        return self._observer.refused(refused)


def _read(one: Served, call: CallMetadata, asked: TranslatedRequest) -> RequestReader:
    request = one.manager.open(call, asked, streams=False)
    reader = RequestReader(request, one.detached)
    one.manager.submit(request)
    return reader


def can_go_on(spec: types_pb2.GenerationSpec) -> bool:
    """Whether `spec` holds a prompt, so that the generation can be continued without its owner."""
    return spec.WhichOneof("prompt") is not None


def check_id(generation_id: str) -> None:
    """Raises `ServiceError` GENERATION_NOT_FOUND for an id of impossible length."""
    if not 1 <= len(generation_id) <= MAX_ID_LENGTH:
        raise not_found("generation", generation_id, "send the id that Accepted named")
