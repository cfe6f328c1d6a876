"""The handlers of InferenceService: one coroutine per call, `context.write` and never a generator.

Each call: read the metadata, translate, open at the desk, write what comes, close in `finally`. Closing waits for
nothing, so a cancelled call leaves at once; cancellation is always raised on.
"""

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

import grpc
from sluice.v1 import inference_pb2

from engine.errors import ServiceError, cancelled, deadline_exceeded
from services.faults import fault
from services.gateway.access.identity import CALLER
from services.gateway.access.metadata import CallMetadata, Context, read_call, read_trace
from services.gateway.calls.neighbours import PeerGateways
from services.gateway.calls.refusal import bare, refuse, turn_away
from services.gateway.calls.session import Session
from services.gateway.calls.story import EventFormat
from services.gateway.contract import translate
from services.gateway.contract.errors import not_found
from services.gateway.contract.translate import TranslatedRequest
from services.gateway.requests import answers
from services.gateway.requests.desk import RequestManager
from services.gateway.requests.followed import TrackedRequest
from services.gateway.requests.open_requests import RequestStatus
from services.gateway.requests.parking import DetachedSessions
from services.messages.details import Detokenized, Tokenized
from services.messages.messages import Role
from services.telemetry.logs import about, about_trace

_T = TypeVar("_T")
_STATES = {
    RequestStatus.RUNNING: inference_pb2.GENERATION_STATE_RUNNING,
    RequestStatus.FINISHED: inference_pb2.GENERATION_STATE_FINISHED,
    RequestStatus.FAILED: inference_pb2.GENERATION_STATE_FAILED,
    RequestStatus.CANCELLED: inference_pb2.GENERATION_STATE_CANCELLED,
}


class Inference:
    """The handlers. Errors become a status in `_answer` and nowhere else."""

    def __init__(self, desk: RequestManager, parking: DetachedSessions, neighbours: PeerGateways) -> None:
        self._desk = desk
        self._neighbours = neighbours
        self._parking = parking
        self._making = asyncio.Lock()  # of answers that take long to make

    async def generate(
        self, request: inference_pb2.GenerateRequest, context: Context
    ) -> inference_pb2.GenerateResponse:
        """Generate: everything at once, at the end."""

        async def body(session: Session) -> inference_pb2.GenerateResponse:
            await session.outcome()
            return answers.whole(session.request)

        def ask(call: CallMetadata) -> TranslatedRequest:
            return translate.whole(request.spec, call.priority, self._desk.settings)

        return await self._answer("Generate", context, self._opening(ask), body)

    async def stream_generate(self, request: inference_pb2.StreamGenerateRequest, context: Context) -> None:
        """StreamGenerate: accepted, deltas, output_finished, finished."""

        def ask(call: CallMetadata) -> TranslatedRequest:
            return translate.generation(request.spec, call.priority, self._desk.settings)

        async def body(session: Session) -> None:
            manner = EventFormat(is_eager=False, tells_prompt=session.request.asked.tells_prompt)
            await session.stream(inference_pb2.StreamGenerateResponse, manner)

        await self._answer("StreamGenerate", context, self._opening(ask, streams=True), body)

    async def resume_generate(self, request: inference_pb2.ResumeGenerateRequest, context: Context) -> None:
        """ResumeGenerate: what the reader lacks of a generation that outlived its last one, and what comes."""
        point = request.spec.resume
        request_id, owner = self._neighbours.split(point.generation_id)
        can_go_on = request.spec.WhichOneof("prompt") is not None  # with what its client has
        if self._neighbours.is_other(owner):
            try:
                await self._neighbours.resume(owner, CALLER.get().tenant, request, context)
                return
            except ServiceError as error:
                if not can_go_on:
                    await turn_away(self._desk.observer, "ResumeGenerate", context, error)

        def take(call: CallMetadata) -> TrackedRequest:
            translate.check_resume(request.spec)
            try:
                followed = self._parking.take(request_id, call.caller.tenant)
            except ServiceError:
                if not can_go_on:
                    raise
            else:
                self._desk.lift_credit(followed.request)
                return followed
            asked = translate.continuation(request.spec, call.priority, self._desk.settings)
            return TrackedRequest(self._desk, call, asked, streams=True)

        async def body(session: Session) -> None:
            tells_prompt = session.request.asked.tells_prompt and not point.after_seq
            manner = EventFormat(is_eager=False, tells_prompt=tells_prompt, after_seq=point.after_seq)
            await session.stream(inference_pb2.ResumeGenerateResponse, manner)

        await self._answer("ResumeGenerate", context, take, body)

    async def tokenize(self, request: inference_pb2.TokenizeRequest, context: Context) -> bytes:
        """Tokenize: through the ring, as everything. The answer comes encoded; one is made at a time."""

        async def body(session: Session) -> bytes:
            value = await session.outcome()
            assert isinstance(value, Tokenized)
            slices = []
            async with self._making:
                for one in answers.tokenized(session.request, value):
                    slices.append(one)
                    await asyncio.sleep(0)
            return b"".join(slices)

        def ask(call: CallMetadata) -> TranslatedRequest:
            return translate.tokenization(request, self._desk.settings)

        return await self._answer("Tokenize", context, self._opening(ask), body)

    async def detokenize(
        self, request: inference_pb2.DetokenizeRequest, context: Context
    ) -> inference_pb2.DetokenizeResponse:
        """Detokenize: through the ring, as everything."""

        async def body(session: Session) -> inference_pb2.DetokenizeResponse:
            value = await session.outcome()
            assert isinstance(value, Detokenized)
            envelope = session.request.envelope
            return inference_pb2.DetokenizeResponse(model=envelope.model, revision=envelope.revision, text=value.text)

        def ask(call: CallMetadata) -> TranslatedRequest:
            return translate.detokenization(request, self._desk.settings)

        return await self._answer("Detokenize", context, self._opening(ask), body)

    async def cancel_generation(
        self, request: inference_pb2.CancelGenerationRequest, context: Context
    ) -> inference_pb2.CancelGenerationResponse:
        """CancelGeneration: idempotent; says what it found."""
        try:
            if not 1 <= len(request.generation_id) <= 128:
                raise not_found("generation", request.generation_id, "send the id that Accepted named")
            tenant = CALLER.get().tenant
            request_id, owner = self._neighbours.split(request.generation_id)
            if self._neighbours.is_other(owner):
                return await self._neighbours.cancel(owner, tenant, request, context)
            index = request.output_index if request.HasField("output_index") else None
            found, state = self._desk.cancel(request_id, tenant, index)
        except ServiceError as error:
            await refuse(context, error)
            raise
        return inference_pb2.CancelGenerationResponse(found=_STATES[found], state=_STATES[state])

    async def _answer(
        self,
        method: str,
        context: Context,
        find: Callable[[CallMetadata], TrackedRequest],
        body: Callable[[Session], Awaitable[_T]],
    ) -> _T:
        session: Session | None = None
        failure: ServiceError | None = cancelled()  # unless something else is found out
        try:
            call = read_call(method, context)
            session = Session(context, find(call), self._parking)
            answer = await session.run(body)
            failure = None
            return answer
        except ServiceError as error:
            failure = bare(error)
        except asyncio.CancelledError:
            failure = deadline_exceeded() if context.time_remaining() == 0 else cancelled()
            raise
        except grpc.aio.InternalError:
            raise  # the connection is gone
        except Exception as error:
            told = about_trace(read_trace(context)) if session is None else about(session.request.envelope)
            failure = fault(Role.GATEWAY, told, "failed while answering this call", error)
        finally:
            if session is not None:
                session.close(failure)
        if session is None:
            await turn_away(self._desk.observer, method, context, failure)
        await refuse(context, failure, session.request)
        raise failure

    def _opening(
        self, ask: Callable[[CallMetadata], TranslatedRequest], *, streams: bool = False
    ) -> Callable[[CallMetadata], TrackedRequest]:
        return lambda call: TrackedRequest(self._desk, call, ask(call), streams=streams)
