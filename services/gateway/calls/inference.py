"""The handlers of InferenceService except Converse: one coroutine per call, on top of the generation service.

They convert events and write them with `context.write`; none is a generator.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from typing import TypeVar

from sluice.v1 import inference_pb2

from sluice_server.engine.errors import ServiceError
from sluice_server.services.gateway.access.call import CallMetadata
from sluice_server.services.gateway.access.identity import CALLER
from sluice_server.services.gateway.access.metadata import Context
from sluice_server.services.gateway.calls import classes, responses, vectors
from sluice_server.services.gateway.calls.answering import CallEnded, answer
from sluice_server.services.gateway.calls.joined_frames import joined_events
from sluice_server.services.gateway.calls.large import LargeRequestQueue
from sluice_server.services.gateway.calls.peers import PeerGateways
from sluice_server.services.gateway.calls.refusal import refuse, trailers_of, turn_away
from sluice_server.services.gateway.calls.tokenized import tokenized
from sluice_server.services.gateway.generation.service import GenerationService, can_go_on, check_id
from sluice_server.services.gateway.generation.stream import GenerationStream, RequestReader
from sluice_server.services.gateway.requests.open_request import RequestStatus
from sluice_server.services.messages.details import Detokenized, Embedded, Tokenized
from sluice_server.services.messages.work import BYTES_PER_ID
from sluice_server.services.telemetry.observed import Observer

_T = TypeVar("_T")
_R = TypeVar("_R", bound=RequestReader)
Begin = Callable[[CallMetadata], Awaitable[_R]]
_STATES = {
    RequestStatus.RUNNING: inference_pb2.GENERATION_STATE_RUNNING,
    RequestStatus.FINISHED: inference_pb2.GENERATION_STATE_FINISHED,
    RequestStatus.FAILED: inference_pb2.GENERATION_STATE_FAILED,
    RequestStatus.CANCELLED: inference_pb2.GENERATION_STATE_CANCELLED,
}


class Inference:
    """The handlers. Errors become a status in `answer` only."""

    def __init__(
        self, service: GenerationService, peers: PeerGateways, observer: Observer, large: LargeRequestQueue
    ) -> None:
        """Large requests are translated in turns of `large`."""
        self._service = service
        self._peers = peers
        self._observer = observer
        self._large = large
        self._making = asyncio.Lock()  # one response of Tokenize is made at a time

    async def generate(
        self, request: inference_pb2.GenerateRequest, context: Context
    ) -> inference_pb2.GenerateResponse:
        """Generate: returns the whole result at the end."""

        async def begin(call: CallMetadata) -> RequestReader:
            return self._service.generate_whole(call, request.spec)

        async def body(reader: RequestReader) -> inference_pb2.GenerateResponse:
            return responses.whole(await reader.completed())

        return await self._answer("Generate", context, begin, body)

    async def stream_generate(self, request: inference_pb2.StreamGenerateRequest, context: Context) -> None:
        """StreamGenerate: writes accepted, deltas, output_finished, finished."""

        async def begin(call: CallMetadata) -> GenerationStream:
            stream = self._service.generate(call, request.spec)
            if (told := stream.request.asked.told) is not None:
                asyncio.get_running_loop().call_soon(told.params)  # behind the turn that sends the prompt to the ring
            return stream

        async def body(stream: GenerationStream) -> None:
            kind = inference_pb2.StreamGenerateResponse
            await _write_all(stream, kind, context, joins=request.joined_events)

        await self._answer("StreamGenerate", context, begin, body)

    async def resume_generate(self, request: inference_pb2.ResumeGenerateRequest, context: Context) -> None:
        """ResumeGenerate: writes the deltas that the client lacks of a detached generation, then those to come. A
        generation of another gateway is forwarded there; if that fails, it is continued here where the request holds
        all that is needed."""
        request_id, owner = self._peers.split(request.spec.resume.generation_id)
        if self._peers.is_other(owner):
            try:
                await self._peers.resume(owner, CALLER.get().tenant, request, context)
                return
            except ServiceError as error:
                if not can_go_on(request.spec):
                    await turn_away(self._observer, "ResumeGenerate", context, error)

        async def begin(call: CallMetadata) -> GenerationStream:
            return self._service.resume(call, request.spec, request_id)

        async def body(stream: GenerationStream) -> None:
            kind = inference_pb2.ResumeGenerateResponse
            await _write_all(stream, kind, context, joins=request.joined_events)

        await self._answer("ResumeGenerate", context, begin, body)

    async def tokenize(self, request: inference_pb2.TokenizeRequest, context: Context) -> bytes:
        """Tokenize: returns the encoded response. One response is made at a time."""

        async def begin(call: CallMetadata) -> RequestReader:
            return self._service.tokenize(call, request)

        async def body(reader: RequestReader) -> bytes:
            value = await reader.outcome()
            assert isinstance(value, Tokenized)
            return await self._joined(tokenized(reader.request.envelope, value))

        return await self._answer("Tokenize", context, begin, body)

    async def embed(self, request: inference_pb2.EmbedRequest, context: Context) -> bytes:
        """Embed: returns the encoded response. One response is made at a time."""

        async def begin(call: CallMetadata) -> RequestReader:
            return self._service.embed(call, request)

        async def body(reader: RequestReader) -> bytes:
            value = await reader.outcome()
            assert isinstance(value, Embedded)
            return await self._joined(vectors.embedded(reader.request, value))

        return await self._answer("Embed", context, begin, body)

    async def classify(self, request: inference_pb2.ClassifyRequest, context: Context) -> bytes:
        """Classify: returns the encoded response. One response is made at a time."""

        async def begin(call: CallMetadata) -> RequestReader:
            return self._service.classify(call, request)

        async def body(reader: RequestReader) -> bytes:
            value, labels = await reader.outcome(), self._service.labels_of(reader)
            assert isinstance(value, Embedded) and labels is not None
            return await self._joined(classes.classified(reader.request, value, labels))

        return await self._answer("Classify", context, begin, body)

    async def rerank(self, request: inference_pb2.RerankRequest, context: Context) -> inference_pb2.RerankResponse:
        """Rerank: returns the ranking."""

        async def begin(call: CallMetadata) -> RequestReader:
            return self._service.rerank(call, request)

        async def body(reader: RequestReader) -> inference_pb2.RerankResponse:
            value, labels = await reader.outcome(), self._service.labels_of(reader)
            assert isinstance(value, Embedded) and labels is not None
            return classes.ranked(reader.request, value, labels, request.top_n or None)

        return await self._answer("Rerank", context, begin, body)

    async def score(self, request: inference_pb2.ScoreRequest, context: Context) -> inference_pb2.ScoreResponse:
        """Score: returns a score for each pair."""

        async def begin(call: CallMetadata) -> RequestReader:
            return self._service.score(call, request)

        async def body(reader: RequestReader) -> inference_pb2.ScoreResponse:
            value, labels = await reader.outcome(), self._service.labels_of(reader)
            assert isinstance(value, Embedded) and labels is not None
            return classes.scored(reader.request, value, labels)

        return await self._answer("Score", context, begin, body)

    async def detokenize(
        self, request: inference_pb2.DetokenizeRequest, context: Context
    ) -> inference_pb2.DetokenizeResponse:
        """Detokenize: returns the text."""

        async def begin(call: CallMetadata) -> RequestReader:
            size = len(request.token_ids) * BYTES_PER_ID
            return await self._large.run(call.caller.tenant, size, self._service.detokenize(call, request))

        async def body(reader: RequestReader) -> inference_pb2.DetokenizeResponse:
            value = await reader.outcome()
            assert isinstance(value, Detokenized)
            envelope = reader.request.envelope
            return inference_pb2.DetokenizeResponse(model=envelope.model, revision=envelope.revision, text=value.text)

        return await self._answer("Detokenize", context, begin, body)

    async def cancel_generation(
        self, request: inference_pb2.CancelGenerationRequest, context: Context
    ) -> inference_pb2.CancelGenerationResponse:
        """CancelGeneration: idempotent; returns the state found and the state now."""
        try:
            check_id(request.generation_id)
            tenant = CALLER.get().tenant
            request_id, owner = self._peers.split(request.generation_id)
            if self._peers.is_other(owner):
                return await self._peers.cancel(owner, tenant, request, context)
            index = request.output_index if request.HasField("output_index") else None
            found, state = self._service.cancel(tenant, request_id, index)
        except ServiceError as error:
            await refuse(context, error)
            raise
        return inference_pb2.CancelGenerationResponse(found=_STATES[found], state=_STATES[state])

    async def _joined(self, slices: Iterator[bytes]) -> bytes:
        """Returns a large encoded response made of slices. Other calls run between them."""
        made = []
        async with self._making:
            for one in slices:
                made.append(one)
                await asyncio.sleep(0)
        return b"".join(made)

    async def _answer(self, method: str, context: Context, begin: Begin[_R], body: Callable[[_R], Awaitable[_T]]) -> _T:
        async def signed(reader: _R) -> _T:
            answered = await body(reader)
            # Set last: grpc leaks some of the trailers of a cancelled call.
            context.set_trailing_metadata(trailers_of(reader.request))
            return answered

        try:
            return await answer(self._observer, method, context, begin, signed)
        except CallEnded as ended:
            status = ended.status
        await context.abort(*status)
        raise AssertionError("abort raises")


async def _write_all(
    stream: GenerationStream, kind: type[responses.Response], context: Context, *, joins: bool
) -> None:
    """Writes the events of a stream; with `joins`, those that are ready together as one message."""
    if joins:
        await stream.write_all(lambda event: context.write(joined_events(kind, event, stream.further())))
    else:
        await stream.write_all(lambda event: context.write(responses.of_stream(kind, event)))
